// Emptying streams: the device thread, and host threads that wait for it.
#include "simnpu.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int simnpu_late = 1;

// Without compute the device takes no time and has no memory to speak of: whatever is submitted is
// over when the call returns, so nothing is ever queued and no wait ever waits. Kernels come without
// a body, and large copies and fills move nothing. Calls are counted and traced as always.
int simnpu_computes = 1;

static pthread_cond_t work_arrived = PTHREAD_COND_INITIALIZER;
static pthread_cond_t work_done = PTHREAD_COND_INITIALIZER;

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

SIMNPU_API void simnpu_set_wait_hooks(void *(*before)(void), void (*after)(void *)) {
  before_wait = before;
  after_wait = after;
}
SIMNPU_API void simnpu_set_patience(double ms) { patience_ms = ms; }
SIMNPU_API void simnpu_set_delivery(int late) { simnpu_late = late; }
SIMNPU_API int simnpu_delivery(void) { return simnpu_late; }
SIMNPU_API void simnpu_set_compute(int on) { simnpu_computes = on; }

static void after_fork(void) {
  // Only the forking thread exists in the child: a new device thread is started on demand.
  pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
  *sim_mutex() = fresh;
  device_running = 0;
  requests = NULL;
  requests_tail = &requests;
}

__attribute__((constructor)) static void configure(void) {
  const char *deliver = getenv("SIMNPU_DELIVER");
  if (deliver && *deliver) simnpu_late = strcmp(deliver, "now") != 0;
  const char *compute = getenv("SIMNPU_COMPUTE");
  if (compute && *compute) simnpu_computes = strcmp(compute, "none") != 0;
  const char *patience = getenv("SIMNPU_PATIENCE_S");
  if (patience && *patience) patience_ms = atof(patience) * 1e3;
  pthread_atfork(NULL, NULL, after_fork);
}

void sim_wake_device(void) {
  appended++;
  if (requests) pthread_cond_signal(&work_arrived);
}

// ---- the device thread ----------------------------------------------------

typedef enum { RAN, EMPTY, BLOCKED } outcome;

void sim_run_task(task *t, stream *s) {
  double start = sim_now_ms();
  if (t->kind == TASK_GROUP) {
    task **tasks;
    size_t n = sim_group_tasks(t->members, &tasks);
    for (size_t i = 0; i < n; i++) {
      sim_run_task(tasks[i], s);
      sim_task_unref(tasks[i]);
    }
    free(tasks);
    return;
  }
  if (t->run) t->run(t->arg);
  sim_count_executed(t, s, start, sim_now_ms());
}

void sim_run_at_once(stream *s, task *t) {
  sim_run_task(t, s);
  sim_task_unref(t);
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
    for (stream *other = sim_stream_first(); other; other = other->next) {
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
  if (ready) sim_run_task(t, s);
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
    for (stream *s = sim_stream_first(); s; s = s->next) {
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
    while (!requests) pthread_cond_wait(&work_arrived, sim_mutex());
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
    pthread_cond_timedwait(&work_arrived, sim_mutex(), &until);
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
  while (!r.done) pthread_cond_wait(&work_done, sim_mutex());
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
  for (stream *s = sim_stream_first(); s; s = s->next)
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
  if (!simnpu_late && simnpu_computes) host_wait(NULL, 0, 0);
}

SIMNPU_API int simnpu_on_device_thread(void) { return on_device_thread(); }
