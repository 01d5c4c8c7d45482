// Streams as real queues, and the one device thread that empties them.
#include "simnpu.h"
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int simnpu_late = 1;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work_arrived = PTHREAD_COND_INITIALIZER;
static pthread_cond_t work_done = PTHREAD_COND_INITIALIZER;
static stream *streams, **streams_tail = &streams;
static stream *default_stream;
static int stream_ids;

// A host thread's wish: run `s` up to and including `seq`.
typedef struct request {
  struct request *next;
  stream *s; // NULL: every stream
  long seq;
  int patient;  // wait for another thread to unblock it; otherwise run what can run
  int detached; // nobody waits: the device thread frees it
  int done, blocked;
} request;
static request *requests, **requests_tail = &requests;
static pthread_t device_thread;
static int device_running;
static long appended; // grows with every append: tells a blocked device thread to look again
static double patience_ms = 60000;

// Called around a host wait, so that a thread that holds a lock which kernels
// need (Python's) can let go of it.
static void *(*before_wait)(void);
static void (*after_wait)(void *);

void sim_lock(void) { pthread_mutex_lock(&mutex); }
void sim_unlock(void) { pthread_mutex_unlock(&mutex); }

SIMNPU_API void simnpu_set_wait_hooks(void *(*before)(void), void (*after)(void *)) {
  before_wait = before;
  after_wait = after;
}
SIMNPU_API void simnpu_set_patience(double ms) { patience_ms = ms; }
SIMNPU_API void simnpu_set_delivery(int late) { simnpu_late = late; }
SIMNPU_API int simnpu_delivery(void) { return simnpu_late; }

static void after_fork(void) {
  // Only the forking thread exists in the child: a new device thread is started on demand.
  pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
  mutex = fresh;
  device_running = 0;
  requests = NULL;
  requests_tail = &requests;
}

__attribute__((constructor)) static void configure(void) {
  const char *deliver = getenv("SIMNPU_DELIVER");
  if (deliver && *deliver) simnpu_late = strcmp(deliver, "now") != 0;
  const char *patience = getenv("SIMNPU_PATIENCE_S");
  if (patience && *patience) patience_ms = atof(patience) * 1e3;
  pthread_atfork(NULL, NULL, after_fork);
}

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
  appended++;
  if (requests) pthread_cond_signal(&work_arrived);
}

int sim_submit(stream *s, task *t) {
  sim_lock();
  if (!sim_capture_task(s, t)) sim_append(s, t, NULL);
  sim_unlock();
  sim_deliver();
  return SIM_OK;
}

// ---- the device thread ----------------------------------------------------

typedef enum { RAN, EMPTY, BLOCKED } outcome;

static void run_task(task *t, stream *s) {
  double start = sim_now_ms();
  if (t->kind == TASK_GROUP) {
    task **tasks;
    size_t n = sim_group_tasks(t->members, &tasks);
    for (size_t i = 0; i < n; i++) {
      run_task(tasks[i], s);
      sim_task_unref(tasks[i]);
    }
    free(tasks);
    return;
  }
  if (t->run) t->run(t->arg);
  sim_count_executed(t, s, start, sim_now_ms());
}

static int value_arrived(const task *t) {
  uint64_t seen = __atomic_load_n(t->word, __ATOMIC_ACQUIRE);
  switch (t->mode) {
  case 0: return seen >= t->value;
  case 1: return seen == t->value;
  case 2: return (seen & t->value) != 0;
  default: return ~(seen | t->value) != 0;
  }
}

static outcome run_one(stream *s);

static outcome run_through(stream *s, long seq) {
  while (s->completed < seq) {
    outcome o = run_one(s);
    if (o != RAN) return o;
  }
  return RAN;
}

// The value may be written by work on any other stream, which in hardware goes
// on by itself. One entry at a time, so that no stream runs further ahead than
// this wait needs.
static int pursue_value(const task *t) {
  while (!value_arrived(t)) {
    int progress = 0;
    sim_lock();
    stream *other = streams;
    sim_unlock();
    for (; other; other = other->next) {
      if (other->busy || run_one(other) != RAN) continue;
      progress = 1;
      if (value_arrived(t)) return 1;
    }
    if (!progress) return 0;
  }
  return 1;
}

static outcome run_one(stream *s) {
  sim_lock();
  entry *e = s->head;
  sim_unlock();
  if (!e) return EMPTY;
  if (s->busy) return BLOCKED; // a cycle of waits
  task *t = e->work;
  s->busy = 1;
  int ready = 1;
  if (t->kind == TASK_WAIT && !e->at->done) {
    run_through(e->at->at, e->at->seq);
    ready = e->at->done;
  } else if (t->kind == TASK_VALUE_WAIT) {
    ready = pursue_value(t);
  }
  if (ready) run_task(t, s);
  s->busy = 0;
  if (!ready) return BLOCKED;
  sim_lock();
  if (t->kind == TASK_RECORD) {
    e->at->when_ms = sim_now_ms();
    e->at->done = 1;
  }
  s->head = e->next;
  if (!s->head) s->tail = &s->head;
  s->completed = e->seq;
  sim_unlock();
  sim_ticket_unref(e->at);
  sim_task_unref(t);
  free(e);
  return RAN;
}

static int serve(request *r) { // 1 when fulfilled
  if (r->s) return run_through(r->s, r->seq) == RAN;
  int progress = 1, left = 0;
  while (progress) {
    progress = left = 0;
    for (stream *s = streams; s; s = s->next) {
      outcome o = run_one(s);
      if (o == RAN) progress = 1;
      if (o == BLOCKED) left = 1;
    }
  }
  return !left;
}

static void finish(request *r) {
  request **at = &requests;
  while (*at != r) at = &(*at)->next;
  *at = r->next;
  if (!requests) requests_tail = &requests;
  else if (requests_tail == &r->next) requests_tail = at;
  r->done = 1;
  if (r->detached) free(r);
  else pthread_cond_broadcast(&work_done);
}

static void *device_main(void *unused) {
  (void)unused;
  double blocked_since = 0;
  sim_lock();
  for (;;) {
    while (!requests) pthread_cond_wait(&work_arrived, &mutex);
    long seen = appended;
    int served = 0;
    for (request *r = requests, *next; r; r = next) {
      sim_unlock();
      int fulfilled = serve(r);
      sim_lock();
      next = r->next;
      if (fulfilled || !r->patient) {
        finish(r);
        served = 1;
      }
    }
    if (served) {
      blocked_since = 0;
      continue;
    }
    if (seen != appended) continue;
    if (!blocked_since) blocked_since = sim_now_ms();
    if (sim_now_ms() - blocked_since > patience_ms) {
      request *r = requests;
      r->blocked = 1;
      finish(r);
      blocked_since = 0;
      continue;
    }
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 50000000;
    if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
    pthread_cond_timedwait(&work_arrived, &mutex, &until);
  }
  return NULL;
}

static int on_device_thread(void) {
  return device_running && pthread_equal(pthread_self(), device_thread);
}

static void post(request *r) { // locked
  if (!device_running) {
    device_running = 1;
    pthread_create(&device_thread, NULL, device_main, NULL);
    pthread_detach(device_thread);
  }
  *requests_tail = r;
  requests_tail = &r->next;
  pthread_cond_signal(&work_arrived);
}

static int host_wait(stream *s, long seq, int patient) {
  if (on_device_thread()) return SIM_OK; // a kernel that calls the driver: its stream is running it
  request r = {.s = s, .seq = seq, .patient = patient};
  void *held = before_wait ? before_wait() : NULL;
  sim_lock();
  post(&r);
  while (!r.done) pthread_cond_wait(&work_done, &mutex);
  sim_unlock();
  if (after_wait) after_wait(held);
  if (r.blocked)
    return sim_fail(SIM_FAILED,
                    "the host waited %.0f s for stream %d, which waits for a value or an event that "
                    "no queued work provides: find the missing write or record",
                    patience_ms / 1e3, s ? s->id : -1);
  return sim_take_failure();
}

int sim_wait(stream *s, long seq) {
  sim_lock();
  int idle = s->completed >= seq;
  sim_unlock();
  return idle ? sim_take_failure() : host_wait(s, seq, 1);
}

int sim_wait_all(void) {
  int idle = 1;
  sim_lock();
  for (stream *s = streams; s; s = s->next)
    if (s->head) idle = 0;
  sim_unlock();
  return idle ? sim_take_failure() : host_wait(NULL, 0, 1);
}

// Asking does not hurry a device, so a query reports what has happened. But a caller that keeps asking
// is polling, and time passes for it: in the end the device is sent on, behind the caller's back. The
// query itself must not wait: allocators ask with their locks held, and a kernel may need those.
void sim_polled(int *queries, stream *s, long seq) {
  if (++*queries != 64) return;
  request *r = calloc(1, sizeof *r);
  *r = (request){.s = s, .seq = seq, .detached = 1};
  sim_lock();
  post(r);
  sim_unlock();
}

void sim_deliver(void) {
  if (!simnpu_late) host_wait(NULL, 0, 0);
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
SIMNPU_API int simnpu_on_device_thread(void) { return on_device_thread(); }
// How many entries of a stream have not taken effect yet.
SIMNPU_API long simnpu_pending(void *handle) {
  stream *s = sim_stream(handle);
  sim_lock();
  long n = s->issued - s->completed;
  sim_unlock();
  return n;
}
