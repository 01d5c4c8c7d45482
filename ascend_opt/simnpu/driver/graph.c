// Graph capture and replay. Capturing keeps tasks instead of queueing them; a
// replay queues them again, with fresh tickets for the events recorded inside.
// Every stream that joins a capture is a lane; a lane other than the first gets
// a stream of its own for replays, so that a captured side stream stays one.
#include "simnpu.h"
#include <stdlib.h>
#include <string.h>

enum { LANES = 64 };

typedef struct node {
  int lane, record;
  task *work;
} node;

// How much of every lane has happened before a place in the graph.
typedef struct progress {
  int seen[LANES];
} progress;

struct graph {
  long id;
  node *nodes;
  size_t n;
  int lanes, records;
  progress now[LANES];
  progress *at_record;
  int origin_id[LANES]; // whose work a lane was, for messages
  stream *lane_stream[LANES];
  group *open;
};

struct group { // tasks whose parameters may be replaced between replays
  int refs;
  task **tasks;
  size_t n;
};

static long captures;

static void push_task(task ***list, size_t *n, task *t) {
  *list = realloc(*list, (*n + 1) * sizeof **list);
  (*list)[(*n)++] = t;
}

static void add_node(graph *g, int lane, task *t, int record) {
  g->nodes = realloc(g->nodes, (g->n + 1) * sizeof *g->nodes);
  g->nodes[g->n++] = (node){lane, record, t};
  g->now[lane].seen[lane]++;
}

int sim_capture_task(stream *s, task *t) {
  if (s->update && t->kind == TASK_WORK) {
    push_task(&s->pending, &s->npending, t);
    return 1;
  }
  graph *g = s->capture;
  if (!g) return 0;
  if (g->open && t->kind == TASK_WORK) push_task(&g->open->tasks, &g->open->n, t);
  else add_node(g, s->lane, t, -1);
  return 1;
}

int sim_capture_record(stream *s, event *e, task *t) {
  graph *g = s->capture;
  if (!g) return 0;
  e->capture = g->id;
  e->record = g->records++;
  add_node(g, s->lane, t, e->record);
  g->at_record = realloc(g->at_record, g->records * sizeof *g->at_record);
  g->at_record[e->record] = g->now[s->lane];
  return 1;
}

static graph *active(long id) {
  for (stream *s = sim_stream_first(); id && s; s = s->next)
    if (s->capture && s->capture->id == id) return s->capture;
  return NULL;
}

int sim_capture_wait(stream *s, event *e, task *t) {
  graph *g = active(e->capture);
  if (!g || (s->capture && s->capture != g)) {
    if (!s->capture) return 0;
    // Inside a capture, work queued before it is not part of the graph.
    sim_task_unref(t);
    return 1;
  }
  if (!s->capture) {
    if (g->lanes == LANES) return 0;
    s->capture = g;
    s->lane = g->lanes++;
    g->origin_id[s->lane] = s->id;
  }
  for (int i = 0; i < g->lanes; i++)
    if (g->now[s->lane].seen[i] < g->at_record[e->record].seen[i])
      g->now[s->lane].seen[i] = g->at_record[e->record].seen[i];
  add_node(g, s->lane, t, e->record);
  return 1;
}

SIMNPU_API int aclmdlRICaptureBegin(void *handle, int mode) {
  (void)mode;
  stream *s = sim_stream(handle);
  sim_count(CALL_graph_capture, s, 0, NULL);
  if (s->capture) return sim_fail(SIM_FAILED, "stream %d is being captured already", s->id);
  graph *g = calloc(1, sizeof *g);
  sim_lock();
  g->id = ++captures;
  g->lanes = 1;
  g->origin_id[0] = s->id;
  s->lane = 0;
  s->capture = g;
  sim_unlock();
  return SIM_OK;
}

static void destroy(graph *g) {
  for (size_t i = 0; i < g->n; i++) sim_task_unref(g->nodes[i].work);
  free(g->nodes);
  free(g->at_record);
  free(g);
}

SIMNPU_API int aclmdlRICaptureEnd(void *handle, void **out) {
  stream *s = sim_stream(handle);
  graph *g = s->capture;
  *out = NULL;
  if (!g) return sim_fail(SIM_FAILED, "stream %d is not being captured", s->id);
  sim_lock();
  for (stream *x = sim_stream_first(); x; x = x->next)
    if (x->capture == g) {
      x->capture = NULL;
      x->lane = -1;
    }
  int loose = 0;
  for (int i = 1; i < g->lanes; i++)
    if (g->now[0].seen[i] < g->now[i].seen[i]) loose = i;
  if (!loose)
    for (int i = 1; i < g->lanes; i++) g->lane_stream[i] = sim_stream_new();
  sim_unlock();
  if (loose) {
    int id = g->origin_id[loose], left = g->now[loose].seen[loose] - g->now[0].seen[loose];
    destroy(g);
    return sim_fail(SIM_FAILED,
                    "capture ended with unjoined work: %d entries of stream %d are not waited for by the "
                    "capturing stream %d; record an event on it and let the capturing stream wait",
                    left, id, s->id);
  }
  *out = g;
  return SIM_OK;
}

SIMNPU_API int aclmdlRICaptureGetInfo(void *handle, int *status, void **model) {
  stream *s = sim_stream(handle);
  if (status) *status = s->capture ? 1 : 0;
  if (model) *model = s->capture;
  return SIM_OK;
}

static void count_replay(const task *t) {
  if (t->kind != TASK_GROUP) {
    sim_count_replayed(t);
    return;
  }
  for (size_t i = 0; i < t->members->n; i++) sim_count_replayed(t->members->tasks[i]);
}

static void append_record(stream *s, ticket *at) {
  sim_append(s, sim_task_new(TASK_RECORD, CALL_record_event, NULL), at);
}
static void append_wait(stream *s, ticket *at) {
  sim_append(s, sim_task_new(TASK_WAIT, CALL_stream_wait_event, NULL), at);
}

// Without compute most of a graph is kernels, which have no body: they are counted, and that is all.
static void replay_at_once(graph *g, stream *s) {
  double now = sim_now_ms();
  for (size_t i = 0; i < g->n; i++) {
    task *t = g->nodes[i].work;
    stream *on = g->nodes[i].lane ? g->lane_stream[g->nodes[i].lane] : s;
    count_replay(t);
    if (t->run || t->kind == TASK_GROUP) sim_run_task(t, on);
    else sim_count_executed(t, on, now, now);
  }
}

SIMNPU_API int aclmdlRIExecuteAsync(void *model, void *handle) {
  graph *g = model;
  stream *s = sim_stream(handle);
  sim_count(CALL_graph_replay, s, 0, NULL);
  if (s->capture) return sim_fail(SIM_FAILED, "replay on stream %d while it is captured", s->id);
  if (!simnpu_computes) return replay_at_once(g, s), SIM_OK;
  ticket **at = calloc(g->records + 1, sizeof *at);
  sim_lock();
  ticket *start = sim_ticket_new(s);
  append_record(s, start);
  for (int i = 1; i < g->lanes; i++) append_wait(g->lane_stream[i], start);
  for (size_t i = 0; i < g->n; i++) {
    node *x = &g->nodes[i];
    stream *to = x->lane ? g->lane_stream[x->lane] : s;
    if (x->work->kind == TASK_RECORD) at[x->record] = sim_ticket_new(to);
    sim_task_ref(x->work);
    sim_append(to, x->work, x->record >= 0 ? at[x->record] : NULL);
    count_replay(x->work);
  }
  sim_ticket_unref(start);
  for (int i = 0; i < g->records; i++) sim_ticket_unref(at[i]);
  sim_unlock();
  free(at);
  sim_deliver();
  return SIM_OK;
}

SIMNPU_API int aclmdlRIDestroy(void *model) {
  if (model) destroy(model); // queued replays hold their own references to the tasks
  return SIM_OK;
}

// ---- task groups: captured kernels whose parameters change between replays ----

group *sim_group_ref(group *g) {
  __atomic_add_fetch(&g->refs, 1, __ATOMIC_RELAXED);
  return g;
}
void sim_group_unref(group *g) {
  if (__atomic_sub_fetch(&g->refs, 1, __ATOMIC_ACQ_REL)) return;
  for (size_t i = 0; i < g->n; i++) sim_task_unref(g->tasks[i]);
  free(g->tasks);
  free(g);
}
size_t sim_group_tasks(group *g, task ***out) {
  sim_lock();
  size_t n = g->n;
  *out = malloc((n + 1) * sizeof **out);
  for (size_t i = 0; i < n; i++) sim_task_ref((*out)[i] = g->tasks[i]);
  sim_unlock();
  return n;
}

SIMNPU_API int aclmdlRICaptureTaskGrpBegin(void *handle) {
  stream *s = sim_stream(handle);
  graph *g = s->capture;
  if (!g) return sim_fail(SIM_FAILED, "a task group begins on stream %d outside a capture", s->id);
  sim_lock();
  g->open = calloc(1, sizeof *g->open);
  g->open->refs = 1;
  sim_unlock();
  return SIM_OK;
}
SIMNPU_API int aclmdlRICaptureTaskGrpEnd(void *handle, void **out) {
  stream *s = sim_stream(handle);
  graph *g = s->capture;
  if (!g || !g->open) return sim_fail(SIM_FAILED, "no task group is open on stream %d", s->id);
  task *t = sim_task_new(TASK_GROUP, CALL_kernel, NULL);
  sim_lock();
  *out = g->open;
  t->members = g->open; // the node owns the group; the caller's handle is good while the graph lives
  g->open = NULL;
  add_node(g, s->lane, t, -1);
  sim_unlock();
  return SIM_OK;
}

typedef struct update {
  group *of;
  task **tasks;
  size_t n;
} update;

static void run_update(void *arg) { // swaps; drop_update then frees what was replaced
  update *u = arg;
  sim_lock();
  task **tasks = u->of->tasks;
  size_t n = u->of->n;
  u->of->tasks = u->tasks;
  u->of->n = u->n;
  u->tasks = tasks;
  u->n = n;
  sim_unlock();
}
static void drop_update(void *arg) {
  update *u = arg;
  for (size_t i = 0; i < u->n; i++) sim_task_unref(u->tasks[i]);
  free(u->tasks);
  sim_group_unref(u->of);
  free(u);
}

SIMNPU_API int aclmdlRICaptureTaskUpdateBegin(void *handle, void *group_handle) {
  stream *s = sim_stream(handle);
  sim_count(CALL_graph_update, s, 0, NULL);
  sim_lock();
  s->update = sim_group_ref(group_handle);
  sim_unlock();
  return SIM_OK;
}
SIMNPU_API int aclmdlRICaptureTaskUpdateEnd(void *handle) {
  stream *s = sim_stream(handle);
  update *u = calloc(1, sizeof *u);
  sim_lock();
  *u = (update){s->update, s->pending, s->npending};
  s->update = NULL;
  s->pending = NULL;
  s->npending = 0;
  sim_unlock();
  task *t = sim_task_new(TASK_WORK, CALL_graph_update, NULL);
  t->run = run_update;
  t->drop = drop_update;
  t->arg = u;
  return sim_submit(s, t);
}
