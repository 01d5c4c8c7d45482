// Counters, the trace file, and errors.
#define _GNU_SOURCE
#include "simnpu.h"
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SIMNPU_NAME(name) #name,
static const char *names[] = {SIMNPU_CALLS(SIMNPU_NAME)};
static long calls[CALL_KINDS], bytes_of[CALL_KINDS], replayed[CALL_KINDS], executed[CALL_KINDS];
static long replayed_bytes[CALL_KINDS];

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static FILE *out;
static char directory[4096], step[256];
static pid_t out_pid;
static long call_ids;

// Tells where in the program the calling thread is: set by the operator library.
static int (*where)(char *room, size_t n);

SIMNPU_API void simnpu_set_where(int (*fn)(char *, size_t)) { where = fn; }

double sim_now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

__attribute__((constructor)) static void configure(void) {
  const char *to = getenv("SIMNPU_TRACE");
  if (to) snprintf(directory, sizeof directory, "%s", to);
}

// One file a process: it is opened anew in a forked child. Locked.
static FILE *sink(void) {
  if (!directory[0]) return NULL;
  if (out && out_pid == getpid()) return out;
  char path[4200];
  out_pid = getpid();
  snprintf(path, sizeof path, "%s/%d.jsonl", directory, (int)out_pid);
  out = fopen(path, "a");
  if (!out) {
    fprintf(stderr, "simnpu: cannot write the trace %s: tracing is off\n", path);
    directory[0] = 0;
  } else {
    setvbuf(out, NULL, _IOLBF, 1 << 16);
  }
  return out;
}

static void put_string(FILE *f, const char *key, const char *s) {
  fprintf(f, ",\"%s\":\"", key);
  for (; *s; s++) {
    if (*s == '"' || *s == '\\') fputc('\\', f);
    if ((unsigned char)*s >= 32) fputc(*s, f);
  }
  fputc('"', f);
}

void sim_count(call_kind c, stream *s, size_t bytes, const char *name) {
  __atomic_add_fetch(&calls[c], 1, __ATOMIC_RELAXED);
  __atomic_add_fetch(&bytes_of[c], (long)bytes, __ATOMIC_RELAXED);
  if (!directory[0]) return;
  char place[512];
  int known = where ? where(place, sizeof place) : 0;
  pthread_mutex_lock(&mutex);
  FILE *f = sink();
  if (f) {
    fprintf(f, "{\"k\":\"call\",\"t\":%.4f,\"c\":\"%s\",\"s\":%d,\"n\":%zu,\"tid\":%ld,\"id\":%ld",
            sim_now_ms(), names[c], s ? s->id : -1, bytes, (long)syscall(SYS_gettid), ++call_ids);
    if (s && s->capture) fputs(",\"captured\":1", f);
    if (name) put_string(f, "name", name);
    if (known) put_string(f, "at", place);
    if (step[0]) put_string(f, "step", step);
    fputs("}\n", f);
  }
  pthread_mutex_unlock(&mutex);
}

void sim_count_executed(const task *t, stream *s, double start_ms, double end_ms) {
  __atomic_add_fetch(&executed[t->call], 1, __ATOMIC_RELAXED);
  if (!directory[0]) return;
  pthread_mutex_lock(&mutex);
  FILE *f = sink();
  if (f) {
    fprintf(f, "{\"k\":\"run\",\"t\":%.4f,\"d\":%.4f,\"c\":\"%s\",\"s\":%d,\"n\":%zu", start_ms,
            end_ms - start_ms, names[t->call], s->id, t->bytes);
    if (t->name) put_string(f, "name", t->name);
    fputs("}\n", f);
  }
  pthread_mutex_unlock(&mutex);
}

void sim_count_replayed(const task *t) {
  __atomic_add_fetch(&replayed[t->call], 1, __ATOMIC_RELAXED);
  __atomic_add_fetch(&replayed_bytes[t->call], (long)t->bytes, __ATOMIC_RELAXED);
}

SIMNPU_API void simnpu_mark(const char *text) {
  pthread_mutex_lock(&mutex);
  snprintf(step, sizeof step, "%s", text);
  FILE *f = sink();
  if (f) {
    fprintf(f, "{\"k\":\"mark\",\"t\":%.4f,\"tid\":%ld", sim_now_ms(), (long)syscall(SYS_gettid));
    put_string(f, "name", text);
    fputs("}\n", f);
  }
  pthread_mutex_unlock(&mutex);
}

// Redirects the trace of this process; "" stops it.
SIMNPU_API void simnpu_trace_to(const char *to) {
  pthread_mutex_lock(&mutex);
  if (out && out_pid == getpid()) fclose(out);
  out = NULL;
  snprintf(directory, sizeof directory, "%s", to);
  pthread_mutex_unlock(&mutex);
}

SIMNPU_API int simnpu_call_kinds(void) { return CALL_KINDS; }
SIMNPU_API const char *simnpu_call_name(int c) { return names[c]; }
// Rows: calls, bytes, replayed, replayed bytes, executed; CALL_KINDS columns each.
SIMNPU_API void simnpu_counters(long *room) {
  const long *rows[] = {calls, bytes_of, replayed, replayed_bytes, executed};
  for (int r = 0; r < 5; r++)
    for (int c = 0; c < CALL_KINDS; c++)
      room[r * CALL_KINDS + c] = __atomic_load_n(&rows[r][c], __ATOMIC_RELAXED);
}

// ---- errors ----------------------------------------------------------------

static __thread char message[2048];
static char deferred[2048];
static int deferred_code;

int sim_fail(int code, const char *fmt, ...) {
  va_list args;
  va_start(args, fmt);
  vsnprintf(message, sizeof message, fmt, args);
  va_end(args);
  return code;
}

// Deferred work reports here; the next host wait returns the failure, as on a card.
SIMNPU_API void simnpu_work_failed(const char *text) {
  fprintf(stderr, "simnpu: %s\n", text);
  pthread_mutex_lock(&mutex);
  if (!deferred_code) {
    deferred_code = SIM_FAILED;
    snprintf(deferred, sizeof deferred, "%s", text);
  }
  pthread_mutex_unlock(&mutex);
}

int sim_take_failure(void) {
  if (!deferred_code) return SIM_OK;
  pthread_mutex_lock(&mutex);
  int code = deferred_code;
  snprintf(message, sizeof message, "%s", deferred);
  deferred_code = 0;
  pthread_mutex_unlock(&mutex);
  return code;
}

SIMNPU_API const char *aclGetRecentErrMsg(void) { return message; }
SIMNPU_API int aclrtGetLastError(int level) {
  (void)level;
  return SIM_OK;
}
