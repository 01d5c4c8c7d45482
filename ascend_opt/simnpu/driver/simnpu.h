// Simulated Ascend runtime: what the driver's own files share.
//
// The model. A stream is a FIFO of entries. Nothing in it happens until a host
// thread has to wait for it (late delivery), or at once (now delivery). All
// entries are executed by one "device" thread, so a kernel never runs inside
// whatever the calling thread happens to be in the middle of. Recording an
// event creates a ticket: an exact place in one stream's queue.
#pragma once
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define SIMNPU_API __attribute__((visibility("default")))

// Error codes: any value but 0 is a failure to the callers; these are our own.
enum { SIM_OK = 0, SIM_BAD_ARGUMENT = 100000, SIM_NO_MEMORY = 200000, SIM_FAILED = 500000 };

// One line per kind of driver call that is counted and traced.
#define SIMNPU_CALLS(X)                                                                  \
  X(memcpy_sync) X(memcpy_async_h2d) X(memcpy_async_d2h) X(memcpy_async_d2d)             \
  X(memset_async) X(record_event) X(stream_wait_event) X(sync_event) X(sync_stream)      \
  X(sync_device) X(query_event) X(query_stream) X(cmo_async) X(hostfunc) X(kernel)       \
  X(value_write) X(value_wait) X(graph_capture) X(graph_replay) X(graph_update)          \
  X(collective) X(aclop)
#define SIMNPU_ENUM(name) CALL_##name,
typedef enum { SIMNPU_CALLS(SIMNPU_ENUM) CALL_KINDS } call_kind;

typedef struct stream stream;
typedef struct graph graph;
typedef struct group group;

// A place in a stream's queue, made by recording an event.
typedef struct ticket {
  int refs, done, queries;
  stream *at;
  long seq;
  double when_ms;
} ticket;

typedef enum { TASK_WORK, TASK_RECORD, TASK_WAIT, TASK_VALUE_WAIT, TASK_GROUP } task_kind;

// What a queue entry or a graph node does. Immutable once enqueued, counted, so
// that a captured task can be replayed any number of times.
typedef struct task {
  task_kind kind;
  call_kind call;
  int refs;
  char *name;
  size_t bytes;
  void (*run)(void *);  // TASK_WORK; may be NULL
  void (*drop)(void *); // frees arg
  void *arg;
  volatile uint32_t *word; // TASK_VALUE_WAIT
  uint64_t value;
  uint32_t mode;
  group *members; // TASK_GROUP
} task;

typedef struct entry {
  struct entry *next;
  task *work;
  ticket *at; // TASK_RECORD, TASK_WAIT
  long seq;
} entry;

struct stream {
  struct stream *next;
  int id, busy, queries;
  long issued, completed;
  entry *head, **tail;
  graph *capture; // this stream's work is being captured
  int lane;
  group *update; // work replaces this captured group
  task **pending;
  size_t npending;
};

// streams.c
void sim_lock(void);
void sim_unlock(void);
pthread_mutex_t *sim_mutex(void);      // what sim_lock locks
stream *sim_stream(void *handle);      // NULL is the default stream
stream *sim_stream_new(void);
stream *sim_stream_first(void);
task *sim_task_new(task_kind kind, call_kind call, const char *name);
void sim_task_ref(task *t);
void sim_task_unref(task *t);
ticket *sim_ticket_new(stream *s);
void sim_ticket_ref(ticket *t);
void sim_ticket_unref(ticket *t);
void sim_append(stream *s, task *t, ticket *at); // locked; takes over the caller's reference to t
int sim_submit(stream *s, task *t);              // append or capture, then deliver as configured

// executor.c
extern int simnpu_late;
extern int simnpu_computes;                      // 0: nothing is queued, see sim_run_at_once
void sim_run_at_once(stream *s, task *t);        // takes over the caller's reference to t
void sim_run_task(task *t, stream *s);
void sim_wake_device(void);                      // locked: something was appended
void sim_deliver(void);                          // now delivery: run whatever can run
int sim_wait(stream *s, long seq);               // host waits; s NULL: every stream
int sim_wait_all(void);
void sim_polled(int *queries, stream *s, long seq); // one more query of unfinished work

// events.c
typedef struct event {
  ticket *last; // where it was last recorded, outside any capture
  long capture; // or: the capture in which it was last recorded,
  int record;   // and the number of that record there
} event;

// graph.c: all locked
int sim_capture_task(stream *s, task *t);        // 1 if s captures and took t
int sim_capture_record(stream *s, event *e, task *t);
int sim_capture_wait(stream *s, event *e, task *t);
group *sim_group_ref(group *g);
void sim_group_unref(group *g);
size_t sim_group_tasks(group *g, task ***out);   // referenced copies

// copies.c
enum { SIM_SMALL = 64 << 10 }; // bytes; without compute, larger ones are not written to the device
// memory.c
typedef enum { MEM_PAGEABLE, MEM_PINNED, MEM_DEVICE } mem_kind;
mem_kind sim_memory_kind(const void *p);

// trace.c
void sim_count(call_kind c, stream *s, size_t bytes, const char *name);
void sim_count_executed(const task *t, stream *s, double start_ms, double end_ms);
void sim_count_replayed(const task *t);
double sim_now_ms(void);
int sim_fail(int code, const char *fmt, ...);    // remembers the message, returns the code
int sim_take_failure(void);                      // a failure of deferred work, once
