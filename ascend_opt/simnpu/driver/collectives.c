// Collectives of a group of one: a copy in stream order. A larger group is refused.
#include "simnpu.h"
#include <stdlib.h>
#include <string.h>

typedef struct move {
  void *dst;
  const void *src;
  size_t n;
} move;
static void run_move(void *arg) {
  move *m = arg;
  if (m->dst != m->src) memmove(m->dst, m->src, m->n);
}

static size_t element_size(int type) {
  static const size_t sizes[] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2, 16};
  return type >= 0 && type < (int)(sizeof sizes / sizeof *sizes) ? sizes[type] : 1;
}

static int collective(const char *name, const void *src, void *dst, uint64_t n, int type, void *handle) {
  stream *s = sim_stream(handle);
  size_t bytes = n * element_size(type);
  sim_count(CALL_collective, s, bytes, name);
  move *m = malloc(sizeof *m);
  *m = (move){dst, src, simnpu_computes || bytes <= SIM_SMALL ? bytes : 0};
  task *t = sim_task_new(TASK_WORK, CALL_collective, name);
  t->bytes = bytes;
  t->run = run_move;
  t->drop = free;
  t->arg = m;
  return sim_submit(s, t);
}

SIMNPU_API int HcclAllReduce(void *src, void *dst, uint64_t n, int type, int op, void *comm, void *s) {
  (void)op, (void)comm;
  return collective("HcclAllReduce", src, dst, n, type, s);
}
SIMNPU_API int HcclAllGather(void *src, void *dst, uint64_t n, int type, void *comm, void *s) {
  (void)comm;
  return collective("HcclAllGather", src, dst, n, type, s);
}
SIMNPU_API int HcclReduceScatter(void *src, void *dst, uint64_t n, int type, int op, void *comm, void *s) {
  (void)op, (void)comm;
  return collective("HcclReduceScatter", src, dst, n, type, s);
}
static int communicator(uint32_t ranks, void **out) {
  if (ranks > 1)
    return sim_fail(SIM_FAILED, "simnpu has no collectives between processes: a group of %u ranks was "
                                "asked for, 1 is supported (use tensor and pipeline parallel size 1)",
                    ranks);
  *out = calloc(1, 64);
  return SIM_OK;
}
SIMNPU_API int HcclCommInitRootInfoConfig(uint32_t ranks, void *info, uint32_t rank, void *config, void **out) {
  (void)info, (void)rank, (void)config;
  return communicator(ranks, out);
}
SIMNPU_API int HcclCommInitRootInfo(uint32_t ranks, void *info, uint32_t rank, void **out) {
  (void)info, (void)rank;
  return communicator(ranks, out);
}
