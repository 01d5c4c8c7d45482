// Streams as queues of tasks: making them, filling them, and the driver's calls about them.
// executor.c empties them.
#include "simnpu.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static stream *streams, **streams_tail = &streams;
static stream *default_stream;
static int stream_ids;

void sim_lock(void) { pthread_mutex_lock(&mutex); }
void sim_unlock(void) { pthread_mutex_unlock(&mutex); }
pthread_mutex_t *sim_mutex(void) { return &mutex; }

stream *sim_stream_new(void) {
  stream *s = calloc(1, sizeof *s);
  s->tail = &s->head;
  s->lane = -1;
  s->id = stream_ids++;
  *streams_tail = s;
  streams_tail = &s->next;
  return s;
}

stream *sim_stream_first(void) { return streams; }

stream *sim_stream(void *handle) {
  if (handle) return handle;
  sim_lock();
  if (!default_stream) default_stream = sim_stream_new();
  sim_unlock();
  return default_stream;
}

task *sim_task_new(task_kind kind, call_kind call, const char *name) {
  task *t = calloc(1, sizeof *t);
  t->kind = kind;
  t->call = call;
  t->refs = 1;
  t->name = name ? strdup(name) : NULL;
  return t;
}

void sim_task_ref(task *t) { __atomic_add_fetch(&t->refs, 1, __ATOMIC_RELAXED); }

void sim_task_unref(task *t) {
  if (__atomic_sub_fetch(&t->refs, 1, __ATOMIC_ACQ_REL)) return;
  if (t->drop) t->drop(t->arg);
  if (t->members) sim_group_unref(t->members);
  free(t->name);
  free(t);
}

ticket *sim_ticket_new(stream *s) {
  ticket *t = calloc(1, sizeof *t);
  t->refs = 1;
  t->at = s;
  return t;
}

void sim_ticket_ref(ticket *t) { __atomic_add_fetch(&t->refs, 1, __ATOMIC_RELAXED); }
void sim_ticket_unref(ticket *t) {
  if (t && !__atomic_sub_fetch(&t->refs, 1, __ATOMIC_ACQ_REL)) free(t);
}

void sim_append(stream *s, task *t, ticket *at) {
  entry *e = calloc(1, sizeof *e);
  e->work = t;
  e->seq = ++s->issued;
  if (at) {
    e->at = at;
    sim_ticket_ref(at);
    if (t->kind == TASK_RECORD) at->seq = e->seq;
  }
  *s->tail = e;
  s->tail = &e->next;
  s->queries = 0;
  sim_wake_device();
}

int sim_submit(stream *s, task *t) {
  sim_lock();
  int captured = sim_capture_task(s, t);
  if (!captured && simnpu_computes) sim_append(s, t, NULL);
  sim_unlock();
  if (!captured && !simnpu_computes) sim_run_at_once(s, t);
  else sim_deliver();
  return SIM_OK;
}

// ---- the driver's calls ----------------------------------------------------

SIMNPU_API int aclrtCreateStream(void **out) {
  sim_lock();
  *out = sim_stream_new();
  sim_unlock();
  return SIM_OK;
}
SIMNPU_API int aclrtCreateStreamWithConfig(void **out, uint32_t priority, uint32_t flag) {
  (void)priority, (void)flag;
  return aclrtCreateStream(out);
}
SIMNPU_API int aclrtDestroyStream(void *handle) {
  // The struct stays: events and tickets may still name it.
  stream *s = sim_stream(handle);
  return sim_wait(s, s->issued);
}
SIMNPU_API int aclrtDestroyStreamForce(void *handle) { return aclrtDestroyStream(handle); }
SIMNPU_API int aclrtStreamGetId(void *handle, int32_t *id) {
  *id = sim_stream(handle)->id;
  return SIM_OK;
}

SIMNPU_API int aclrtSynchronizeStream(void *handle) {
  stream *s = sim_stream(handle);
  sim_count(CALL_sync_stream, s, 0, NULL);
  return sim_wait(s, s->issued);
}
SIMNPU_API int aclrtSynchronizeStreamWithTimeout(void *handle, int32_t ms) {
  (void)ms;
  return aclrtSynchronizeStream(handle);
}
SIMNPU_API int aclrtSynchronizeDevice(void) {
  sim_count(CALL_sync_device, NULL, 0, NULL);
  return sim_wait_all();
}
SIMNPU_API int aclrtSynchronizeDeviceWithTimeout(int32_t ms) {
  (void)ms;
  return aclrtSynchronizeDevice();
}
SIMNPU_API int aclrtStreamQuery(void *handle, int *status) {
  stream *s = sim_stream(handle);
  sim_count(CALL_query_stream, s, 0, NULL);
  if (s->head) sim_polled(&s->queries, s, s->issued);
  *status = s->head ? 1 : 0;
  return SIM_OK;
}

// ---- for the operator library ----------------------------------------------

SIMNPU_API int simnpu_enqueue(void *handle, const char *name, void (*run)(void *),
                              void (*drop)(void *), void *arg) {
  stream *s = sim_stream(handle);
  task *t = sim_task_new(TASK_WORK, CALL_kernel, name);
  t->run = run;
  t->drop = drop;
  t->arg = arg;
  sim_count(CALL_kernel, s, 0, name);
  return sim_submit(s, t);
}
// Like a stream synchronise by the program, but of the test bed's own making: not counted.
SIMNPU_API int simnpu_settle(void *handle) {
  stream *s = sim_stream(handle);
  return sim_wait(s, s->issued);
}
SIMNPU_API int simnpu_capturing(void *handle) { return sim_stream(handle)->capture != NULL; }
// How many entries of a stream have not taken effect yet.
SIMNPU_API long simnpu_pending(void *handle) {
  stream *s = sim_stream(handle);
  sim_lock();
  long n = s->issued - s->completed;
  sim_unlock();
  return n;
}
