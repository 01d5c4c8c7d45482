// Memory: device and pinned memory are host memory with a remembered kind.
#define _GNU_SOURCE
#include "simnpu.h"
#include <malloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef struct range {
  struct range *next;
  char *at;
  size_t n;
  mem_kind kind;
  int mapped; // address space only: the host gives a page when it is first touched
} range;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static range *ranges;
static size_t device_used;

static size_t device_total(void) {
  const char *gb = getenv("SIMNPU_MEM_GB");
  return (size_t)(gb && *gb ? atol(gb) : 8) << 30;
}

static void remember(void *at, size_t n, mem_kind kind, int mapped) {
  range *r = malloc(sizeof *r);
  pthread_mutex_lock(&mutex);
  *r = (range){ranges, at, n, kind, mapped};
  ranges = r;
  if (kind == MEM_DEVICE) device_used += n;
  pthread_mutex_unlock(&mutex);
}

static size_t forget(void *at) { // the bytes to unmap, 0 for memory to free
  size_t mapped = 0;
  pthread_mutex_lock(&mutex);
  for (range **r = &ranges; *r; r = &(*r)->next) {
    if ((*r)->at != at) continue;
    range *gone = *r;
    if (gone->kind == MEM_DEVICE) device_used -= gone->n;
    *r = gone->next;
    if (gone->mapped) mapped = gone->n;
    free(gone);
    break;
  }
  pthread_mutex_unlock(&mutex);
  return mapped;
}

mem_kind sim_memory_kind(const void *p) {
  mem_kind kind = MEM_PAGEABLE;
  pthread_mutex_lock(&mutex);
  for (range *r = ranges; r; r = r->next)
    if ((const char *)p >= r->at && (const char *)p < r->at + r->n) {
      kind = r->kind;
      break;
    }
  pthread_mutex_unlock(&mutex);
  return kind;
}

static int allocate(void **out, size_t n, mem_kind kind) {
  *out = NULL;
  if (!n) n = 1;
  if (kind == MEM_DEVICE && device_used + n > device_total())
    return sim_fail(SIM_NO_MEMORY,
                    "simulated device memory: %zu bytes asked for, %zu of %zu in use; raise SIMNPU_MEM_GB",
                    n, device_used, device_total());
  // Without compute nothing fills device memory, so a model need not fit into the host's.
  int mapped = kind == MEM_DEVICE && !simnpu_computes;
  if (mapped) {
    void *at = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return sim_fail(SIM_NO_MEMORY, "no address space for %zu bytes", n);
    madvise(at, n, MADV_NOHUGEPAGE); // or one byte written would take 2 MiB
    *out = at;
  } else if (posix_memalign(out, 512, n)) {
    // Hardware hands out addresses of 512-byte alignment; kernels and torch_npu rely on it.
    return sim_fail(SIM_NO_MEMORY, "no host memory for %zu bytes", n);
  }
  remember(*out, n, kind, mapped);
  return SIM_OK;
}

// Queued work may name freed memory, so its bytes stay until that work has run. Freeing does not wait
// for that: allocators free with their locks held, and a kernel may need those.
typedef struct grave {
  struct grave *next;
  void *at;
  size_t mapped;
  int streams;
  struct {
    stream *s;
    long seq;
  } after[];
} grave;
static grave *graves;

static int is_idle(const grave *g) {
  for (int i = 0; i < g->streams; i++)
    if (g->after[i].s->completed < g->after[i].seq) return 0;
  return 1;
}

static void bury(void *p, size_t mapped) { // and empty the graves whose work has run
  int n = 0;
  sim_lock();
  for (stream *s = sim_stream_first(); s; s = s->next) n += s->head != NULL;
  grave *g = calloc(1, sizeof *g + n * sizeof *g->after);
  g->at = p;
  g->mapped = mapped;
  for (stream *s = sim_stream_first(); s; s = s->next)
    if (s->head) {
      g->after[g->streams].s = s;
      g->after[g->streams++].seq = s->issued;
    }
  g->next = graves;
  graves = g;
  grave *done = NULL;
  for (grave **at = &graves; *at;) {
    grave *x = *at;
    if (!is_idle(x)) {
      at = &x->next;
      continue;
    }
    *at = x->next;
    x->next = done;
    done = x;
  }
  sim_unlock();
  while (done) {
    grave *x = done;
    done = x->next;
    if (x->mapped) munmap(x->at, x->mapped);
    else free(x->at);
    free(x);
  }
}

static int release(void *p) {
  if (!p) return SIM_OK;
  bury(p, forget(p));
  return SIM_OK;
}

SIMNPU_API int aclrtMalloc(void **out, size_t n, int policy) {
  (void)policy;
  return allocate(out, n, MEM_DEVICE);
}
SIMNPU_API int aclrtMallocAlign32(void **out, size_t n, int policy) {
  (void)policy;
  return allocate(out, n, MEM_DEVICE);
}
SIMNPU_API int aclrtFree(void *p) { return release(p); }
SIMNPU_API int aclrtMallocHost(void **out, size_t n) { return allocate(out, n, MEM_PINNED); }
SIMNPU_API int aclrtMallocHostWithCfg(void **out, size_t n, void *config) {
  (void)config;
  return allocate(out, n, MEM_PINNED);
}
SIMNPU_API int aclrtFreeHost(void *p) { return release(p); }
SIMNPU_API int aclrtHostRegister(void *p, uint64_t n, int type, void **device) {
  (void)type;
  remember(p, n, MEM_PINNED, 0);
  if (device) *device = p;
  return SIM_OK;
}
SIMNPU_API int aclrtHostUnregister(void *p) {
  sim_wait_all();
  forget(p);
  return SIM_OK;
}
SIMNPU_API int aclrtGetMemInfo(int attribute, size_t *free_bytes, size_t *total) {
  (void)attribute;
  *total = device_total();
  *free_bytes = *total - device_used;
  return SIM_OK;
}
// pinned or device, to Python: 0 pageable, 1 pinned, 2 device.
SIMNPU_API int simnpu_memory_kind(const void *p) { return sim_memory_kind(p); }
