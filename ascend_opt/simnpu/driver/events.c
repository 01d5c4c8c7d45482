// Events: recording makes a ticket, waiting refers to the latest ticket at the time of the call.
#include "simnpu.h"
#include <stdlib.h>

static int create(void **out) {
  *out = calloc(1, sizeof(event));
  return *out ? SIM_OK : SIM_NO_MEMORY;
}
SIMNPU_API int aclrtCreateEvent(void **out) { return create(out); }
SIMNPU_API int aclrtCreateEventWithFlag(void **out, uint32_t flag) {
  (void)flag;
  return create(out);
}
SIMNPU_API int aclrtCreateEventExWithFlag(void **out, uint32_t flag) {
  (void)flag;
  return create(out);
}
SIMNPU_API int aclrtDestroyEvent(void *handle) {
  event *e = handle;
  sim_lock();
  sim_ticket_unref(e->last);
  sim_unlock();
  free(e);
  return SIM_OK;
}

SIMNPU_API int aclrtRecordEvent(void *handle, void *stream_handle) {
  event *e = handle;
  stream *s = sim_stream(stream_handle);
  sim_count(CALL_record_event, s, 0, NULL);
  int at_once = 0;
  task *t = sim_task_new(TASK_RECORD, CALL_record_event, NULL);
  sim_lock();
  sim_ticket_unref(e->last);
  e->last = NULL;
  if (!sim_capture_record(s, e, t)) {
    e->capture = 0;
    e->last = sim_ticket_new(s);
    if (simnpu_computes) {
      sim_append(s, t, e->last);
    } else {
      e->last->when_ms = sim_now_ms();
      e->last->done = 1;
      at_once = 1;
    }
  }
  sim_unlock();
  if (at_once) sim_run_at_once(s, t);
  else sim_deliver();
  return SIM_OK;
}

SIMNPU_API int aclrtStreamWaitEvent(void *stream_handle, void *handle) {
  event *e = handle;
  stream *s = sim_stream(stream_handle);
  sim_count(CALL_stream_wait_event, s, 0, NULL);
  task *t = sim_task_new(TASK_WAIT, CALL_stream_wait_event, NULL);
  sim_lock();
  int taken = sim_capture_wait(s, e, t);
  int recorded = !taken && e->last; // an event never recorded holds nobody up
  if (recorded && simnpu_computes) {
    sim_append(s, t, e->last);
    taken = 1;
  }
  sim_unlock();
  if (recorded && !taken) sim_run_at_once(s, t);
  else if (!taken) sim_task_unref(t);
  sim_deliver();
  return SIM_OK;
}

// Ascend lets a program reset an event behind a wait; tickets make that needless.
SIMNPU_API int aclrtResetEvent(void *handle, void *stream_handle) {
  (void)handle, (void)stream_handle;
  return SIM_OK;
}

SIMNPU_API int aclrtSynchronizeEvent(void *handle) {
  event *e = handle;
  sim_lock();
  ticket *t = e->last;
  if (t) sim_ticket_ref(t);
  sim_unlock();
  sim_count(CALL_sync_event, t ? t->at : NULL, 0, NULL);
  if (!t) return SIM_OK;
  int rc = sim_wait(t->at, t->seq);
  sim_ticket_unref(t);
  return rc;
}
SIMNPU_API int aclrtSynchronizeEventWithTimeout(void *handle, int32_t ms) {
  (void)ms;
  return aclrtSynchronizeEvent(handle);
}

SIMNPU_API int aclrtQueryEventStatus(void *handle, int *status) {
  event *e = handle;
  sim_lock();
  ticket *t = e->last;
  if (t) sim_ticket_ref(t);
  sim_unlock();
  sim_count(CALL_query_event, t ? t->at : NULL, 0, NULL);
  *status = 1;
  if (!t) return SIM_OK;
  if (!t->done) sim_polled(&t->queries, t->at, t->seq);
  *status = t->done;
  sim_ticket_unref(t);
  return SIM_OK;
}
SIMNPU_API int aclrtQueryEvent(void *handle, int *status) {
  int rc = aclrtQueryEventStatus(handle, status);
  *status = !*status;
  return rc;
}
SIMNPU_API int aclQueryEventRecordedStatus(void *handle, int *status) {
  return aclrtQueryEventStatus(handle, status);
}
SIMNPU_API int aclrtQueryEventWaitStatus(void *handle, int *status) {
  int rc = aclrtQueryEventStatus(handle, status);
  *status = !*status;
  return rc;
}

// Real milliseconds of this CPU between two executed records: no statement about a card.
SIMNPU_API int aclrtEventElapsedTime(float *ms, void *start, void *end) {
  event *a = start, *b = end;
  *ms = a->last && b->last ? (float)(b->last->when_ms - a->last->when_ms) : 0;
  return SIM_OK;
}
