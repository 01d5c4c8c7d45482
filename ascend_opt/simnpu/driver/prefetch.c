// Cache hints and host callbacks: entries that move no data.
#include "simnpu.h"
#include <stdlib.h>

// A hint has no effect on values; it has a place in its stream, a size, and a count.
SIMNPU_API int aclrtCmoAsync(void *src, size_t n, int type, void *handle) {
  (void)src, (void)type;
  stream *s = sim_stream(handle);
  sim_count(CALL_cmo_async, s, n, NULL);
  task *t = sim_task_new(TASK_WORK, CALL_cmo_async, NULL);
  t->bytes = n;
  return sim_submit(s, t);
}

SIMNPU_API int aclrtLaunchHostFunc(void *handle, void (*fn)(void *), void *arg) {
  stream *s = sim_stream(handle);
  sim_count(CALL_hostfunc, s, 0, NULL);
  task *t = sim_task_new(TASK_WORK, CALL_hostfunc, NULL);
  t->run = fn;
  t->arg = arg;
  return sim_submit(s, t);
}
SIMNPU_API int aclrtLaunchCallback(void (*fn)(void *), void *arg, int block, void *handle) {
  (void)block;
  return aclrtLaunchHostFunc(handle, fn, arg);
}
