// Writing a device word from a stream, and holding a stream until a word has a value:
// what torch_npu's external events are made of.
#include "simnpu.h"
#include <stdlib.h>

typedef struct word {
  volatile uint32_t *at;
  uint32_t value;
} word;

static void run_write(void *arg) {
  word *w = arg;
  __atomic_store_n(w->at, w->value, __ATOMIC_RELEASE);
}

SIMNPU_API int aclrtValueWrite(void *at, uint64_t value, uint32_t flag, void *handle) {
  (void)flag;
  stream *s = sim_stream(handle);
  sim_count(CALL_value_write, s, sizeof(uint32_t), NULL);
  word *w = malloc(sizeof *w);
  *w = (word){at, (uint32_t)value};
  task *t = sim_task_new(TASK_WORK, CALL_value_write, NULL);
  t->run = run_write;
  t->drop = free;
  t->arg = w;
  return sim_submit(s, t);
}

SIMNPU_API int aclrtValueWait(void *at, uint64_t value, uint32_t mode, void *handle) {
  stream *s = sim_stream(handle);
  sim_count(CALL_value_wait, s, sizeof(uint32_t), NULL);
  task *t = sim_task_new(TASK_VALUE_WAIT, CALL_value_wait, NULL);
  t->word = at;
  t->value = value;
  t->mode = mode;
  return sim_submit(s, t);
}
