/* Events of one process. */
#include "driver.h"
#include <time.h>

enum { DISABLE_TIMING = 2, INTERPROCESS = 4 };

struct event {
  struct event *next;
  CUevent handle;
  struct context *context;
  int process, references, is_destroyed;
  unsigned flags;
  struct dependency last; /* where it was recorded last: NULL for never */
  uint64_t capture, finished_ns;
};
static struct event *all_events;

static void free_if_unused(struct event *event) {
  if (!event->is_destroyed || event->references) return;
  struct event **at = &all_events;
  while (*at != event) at = &(*at)->next;
  *at = event->next;
  if (event->last.stream) release_stream(event->last.stream);
  free(event);
}

static struct event *new_event(struct context *context, unsigned flags) {
  struct event *event = calloc(1, sizeof *event);
  event->handle = (CUevent)0x6e000000000 + new_number() * 16;
  event->context = context;
  event->process = the_process;
  event->flags = flags;
  event->next = all_events;
  return all_events = event;
}

static CUresult find_event(CUevent handle, struct event **found) {
  for (struct event *event = all_events; event; event = event->next) {
    if (event->handle != handle || event->process != the_process || event->is_destroyed) continue;
    *found = event;
    return event->context->error;
  }
  if (handle) violation("an event was used that is destroyed, or never was");
  return CUDA_ERROR_INVALID_HANDLE;
}

void end_events(int process) {
  for (struct event *event = all_events, *next; event; event = next) {
    next = event->next;
    if (event->process != process || event->is_destroyed) continue;
    event->is_destroyed = 1;
    free_if_unused(event);
  }
}

int live_events(int process) {
  int count = 0;
  for (struct event *event = all_events; event; event = event->next)
    count += !event->is_destroyed && (process < 0 || event->process == process);
  return count;
}

static int is_done(struct dependency record) { return !record.stream || record.stream->done >= record.number; }

static void wait_for(struct event *event) { /* with the lock, which it releases meanwhile */
  struct dependency record = event->last;
  event->references++;
  if (record.stream) record.stream->references++;
  while (!is_done(record)) pthread_cond_wait(&progress, &the_lock);
  if (record.stream) release_stream(record.stream);
  event->references--;
  free_if_unused(event);
}

struct event_work { struct work work; struct event *event; };

static void release_event(struct work *work) {
  struct event *event = ((struct event_work *)work)->event;
  event->references--;
  free_if_unused(event);
}

static CUresult finish_record(struct work *work, struct stream *stream) {
  (void)stream;
  struct event_work *one = (struct event_work *)work;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  lock();
  one->event->finished_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
  unlock(0);
  return CUDA_SUCCESS;
}

static CUresult wait_on_stream(struct work *work, struct stream *stream) { /* the work's dependency is enough */
  (void)work, (void)stream;
  return CUDA_SUCCESS;
}

static struct work *event_work(struct event *event, CUresult (*run)(struct work *, struct stream *)) {
  struct event_work *work = calloc(1, sizeof *work);
  work->work.run = run;
  work->work.release = release_event;
  work->event = event;
  event->references++;
  return &work->work;
}

/* Puts a record on a stream; `work` may depend on others already. */
static CUresult put_record(struct event *event, struct stream *stream, struct work *work) {
  event->capture = 0;
  CUresult result = put_work(stream, work);
  if (result) return result;
  if (event->last.stream) release_stream(event->last.stream);
  stream->references++;
  event->last = (struct dependency){stream, stream->put};
  return CUDA_SUCCESS;
}

EXPORT CUresult cuEventCreate(CUevent *handle, unsigned flags) {
  ENTER("cuEventCreate");
  if (!handle || flags & ~7u || (flags & INTERPROCESS && !(flags & DISABLE_TIMING))) return CUDA_ERROR_INVALID_VALUE;
  lock();
  struct context *context;
  CHECK(current_context(&context));
  *handle = new_event(context, flags)->handle;
  return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuEventDestroy_v2(CUevent handle) { /* at once: pending records and waits are still done */
  ENTER("cuEventDestroy");
  lock();
  struct event *event = all_events;
  while (event && (event->handle != handle || event->process != the_process || event->is_destroyed))
    event = event->next;
  REFUSE_IF(!event, CUDA_ERROR_INVALID_HANDLE);
  event->is_destroyed = 1;
  free_if_unused(event);
  return unlock(CUDA_SUCCESS);
}

static CUresult record(CUevent handle, CUstream on, unsigned flags) {
  lock();
  struct event *event;
  struct stream *stream;
  CHECK(find_stream(on, &stream));
  CHECK(find_event(handle, &event));
  REFUSE_IF(flags > 1, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(event->context != stream->context, CUDA_ERROR_INVALID_HANDLE);
  if (stream->capture) {
    event->capture = stream->capture;
    return unlock(stream->is_capture_invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS);
  }
  CHECK(implicit_capture(stream));
  return unlock(put_record(event, stream, event_work(event, finish_record)));
}

EXPORT CUresult cuEventRecord(CUevent handle, CUstream on) {
  ENTER("cuEventRecord");
  return record(handle, on, 0);
}

EXPORT CUresult cuEventRecordWithFlags(CUevent handle, CUstream on, unsigned flags) {
  ENTER("cuEventRecordWithFlags");
  return record(handle, on, flags);
}

EXPORT CUresult cuCtxRecordEvent(CUcontext context, CUevent handle) { /* from 12.5: all work of the context */
  ENTER("cuCtxRecordEvent");
  lock();
  struct event *event;
  CHECK(known_context(context));
  CHECK(find_event(handle, &event));
  REFUSE_IF(event->context != context, CUDA_ERROR_INVALID_HANDLE);
  CHECK(end_captures(context));
  struct work *work = event_work(event, finish_record);
  struct stream *marker = marker_of(context);
  depend_on_all(marker, work);
  return unlock(put_record(event, marker, work));
}

EXPORT CUresult cuStreamWaitEvent(CUstream on, CUevent handle, unsigned flags) {
  ENTER("cuStreamWaitEvent");
  lock();
  struct event *event;
  struct stream *stream;
  CHECK(find_stream(on, &stream));
  CHECK(find_event(handle, &event));
  REFUSE_IF(flags > 1, CUDA_ERROR_INVALID_VALUE);
  if (event->capture && stream->capture != event->capture) { /* the stream joins the capture */
    REFUSE_IF(stream->capture, CUDA_ERROR_STREAM_CAPTURE_MERGE);
    REFUSE_IF(stream->kind == LEGACY, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    for (struct stream *one = all_streams; one; one = one->next) {
      if (one->capture != event->capture || !one->is_capture_origin) continue;
      stream->capture = one->capture;
      stream->capture_mode = one->capture_mode;
      stream->capture_thread = one->capture_thread;
      stream->is_capture_invalid = one->is_capture_invalid;
      return unlock(CUDA_SUCCESS);
    }
    return unlock(CUDA_ERROR_INVALID_VALUE); /* that capture has ended */
  }
  if (stream->capture) return unlock(event->capture ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
  CHECK(implicit_capture(stream));
  if (is_done(event->last)) return unlock(CUDA_SUCCESS);
  struct work *work = event_work(event, wait_on_stream);
  depend_on(work, event->last);
  return unlock(put_work(stream, work));
}

EXPORT CUresult cuEventQuery(CUevent handle) {
  ENTER("cuEventQuery");
  lock();
  struct event *event;
  CHECK(find_event(handle, &event));
  REFUSE_IF(event->capture, CUDA_ERROR_CAPTURED_EVENT);
  CHECK(refuse_while_capturing(event->context));
  return unlock(is_done(event->last) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

EXPORT CUresult cuEventSynchronize(CUevent handle) {
  ENTER("cuEventSynchronize");
  lock();
  struct event *event;
  CHECK(find_event(handle, &event));
  REFUSE_IF(event->capture, CUDA_ERROR_CAPTURED_EVENT);
  CHECK(refuse_while_capturing(event->context));
  struct context *context = event->context;
  wait_for(event);
  return unlock(context->error);
}

EXPORT CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent from, CUevent to) {
  ENTER("cuEventElapsedTime");
  lock();
  struct event *first, *second;
  CHECK(find_event(from, &first));
  CHECK(find_event(to, &second));
  REFUSE_IF((first->flags | second->flags) & DISABLE_TIMING || !first->last.stream || !second->last.stream,
            CUDA_ERROR_INVALID_HANDLE);
  REFUSE_IF(!is_done(first->last) || !is_done(second->last), CUDA_ERROR_NOT_READY);
  *milliseconds = (float)((double)(int64_t)(second->finished_ns - first->finished_ns) / 1e6);
  return unlock(CUDA_SUCCESS);
}
