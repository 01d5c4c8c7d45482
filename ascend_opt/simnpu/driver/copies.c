// Copies and fills.
#include "simnpu.h"
#include <stdlib.h>
#include <string.h>

enum { H2H, H2D, D2H, D2D };

typedef struct copy {
  void *dst;
  const void *src;
  size_t n;
  void *snapshot; // owned bytes of a pageable source
} copy;

static void run_copy(void *arg) {
  copy *c = arg;
  if (c->n) memmove(c->dst, c->src, c->n);
}
static void drop_copy(void *arg) {
  free(((copy *)arg)->snapshot);
  free(arg);
}

// What a copy or fill moves. Without compute, only small ones are written to device memory: those
// that carry an engine's books, not weights and activations.
static size_t moved(size_t n, int kind) {
  int writes_device = kind == H2D || kind == D2D;
  return simnpu_computes || !writes_device || n <= SIM_SMALL ? n : 0;
}

static int direction(const void *dst, const void *src, int kind) {
  if (kind >= H2H && kind <= D2D) return kind;
  int to = sim_memory_kind(dst) == MEM_DEVICE, from = sim_memory_kind(src) == MEM_DEVICE;
  return to ? (from ? D2D : H2D) : (from ? D2H : H2H);
}

// A blocking copy is immediate and orders itself after nothing: a program that
// needs work on a stream to be done first has to synchronise with that stream.
SIMNPU_API int aclrtMemcpy(void *dst, size_t room, const void *src, size_t n, int kind) {
  sim_count(CALL_memcpy_sync, NULL, n, NULL);
  if (n > room)
    return sim_fail(SIM_BAD_ARGUMENT, "memcpy of %zu bytes into a buffer of %zu", n, room);
  n = moved(n, direction(dst, src, kind));
  if (n) memmove(dst, src, n);
  return SIM_OK;
}

SIMNPU_API int aclrtMemcpyAsync(void *dst, size_t room, const void *src, size_t n, int kind,
                                void *stream_handle) {
  stream *s = sim_stream(stream_handle);
  kind = direction(dst, src, kind);
  call_kind call = kind == D2H   ? CALL_memcpy_async_d2h
                   : kind == D2D ? CALL_memcpy_async_d2d
                                 : CALL_memcpy_async_h2d;
  sim_count(call, s, n, NULL);
  if (n > room)
    return sim_fail(SIM_BAD_ARGUMENT, "async memcpy of %zu bytes into a buffer of %zu", n, room);
  copy *c = calloc(1, sizeof *c);
  c->dst = dst;
  c->src = src;
  c->n = moved(n, kind);
  // The device cannot read pageable memory later: its bytes are staged at the call.
  int later = simnpu_computes || s->capture;
  if (later && (kind == H2D || kind == H2H) && sim_memory_kind(src) == MEM_PAGEABLE && c->n) {
    c->src = c->snapshot = malloc(c->n);
    memcpy(c->snapshot, src, c->n);
  }
  task *t = sim_task_new(TASK_WORK, call, NULL);
  t->bytes = n;
  t->run = run_copy;
  t->drop = drop_copy;
  t->arg = c;
  sim_submit(s, t);
  // Nor can it write pageable memory later: such a copy returns when it is done.
  if (later && kind == D2H && sim_memory_kind(dst) == MEM_PAGEABLE && !s->capture)
    return sim_wait(s, s->issued);
  return SIM_OK;
}

typedef struct fill {
  void *dst;
  int value;
  size_t n;
} fill;

static void run_fill(void *arg) {
  fill *f = arg;
  memset(f->dst, f->value, f->n);
}

SIMNPU_API int aclrtMemset(void *dst, size_t room, int32_t value, size_t n) {
  if (n > room)
    return sim_fail(SIM_BAD_ARGUMENT, "memset of %zu bytes in a buffer of %zu", n, room);
  memset(dst, value, moved(n, H2D));
  return SIM_OK;
}
SIMNPU_API int aclrtMemsetAsync(void *dst, size_t room, int32_t value, size_t n, void *handle) {
  stream *s = sim_stream(handle);
  sim_count(CALL_memset_async, s, n, NULL);
  if (n > room)
    return sim_fail(SIM_BAD_ARGUMENT, "async memset of %zu bytes in a buffer of %zu", n, room);
  fill *f = malloc(sizeof *f);
  *f = (fill){dst, value, moved(n, H2D)};
  task *t = sim_task_new(TASK_WORK, CALL_memset_async, NULL);
  t->bytes = n;
  t->run = run_fill;
  t->drop = free;
  t->arg = f;
  return sim_submit(s, t);
}
