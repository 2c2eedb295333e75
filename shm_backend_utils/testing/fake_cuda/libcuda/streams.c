/* Streams: each is a thread that does its queue with a delay. The legacy stream orders itself with blocking ones. */
#include "driver.h"
#include <time.h>
#include <unistd.h>

struct stream *all_streams;

void depend_on(struct work *work, struct dependency on) {
  if (on.stream->done >= on.number) return;
  size_t count = (size_t)work->dependency_count++;
  work->dependencies = realloc(work->dependencies, (count + 1) * sizeof *work->dependencies);
  work->dependencies[count] = on;
  on.stream->references++;
}

static void depend_on_now(struct work *work, struct stream *stream) {
  depend_on(work, (struct dependency){stream, stream->put});
}

static int is_blocking(struct stream *stream) {
  return (stream->kind == NAMED || stream->kind == PER_THREAD) && !(stream->flags & STREAM_NON_BLOCKING);
}

static void depend_on_blocking(struct work *work, struct context *context) {
  for (struct stream *one = all_streams; one; one = one->next)
    if (one->context == context && is_blocking(one)) depend_on_now(work, one);
}

void depend_on_all(struct stream *marker, struct work *work) {
  for (struct stream *one = all_streams; one; one = one->next)
    if (one->context == marker->context && one != marker) depend_on_now(work, one);
}

static void free_if_unused(struct stream *stream) {
  if (!stream->is_destroyed || stream->has_thread || stream->references) return;
  struct stream **at = &all_streams;
  while (*at != stream) at = &(*at)->next;
  *at = stream->next;
  pthread_cond_destroy(&stream->has_work);
  free(stream);
}

void release_stream(struct stream *stream) {
  stream->references--;
  free_if_unused(stream);
}

static void wait_for_dependencies(struct work *work) { /* and forget them */
  for (int i = 0; i < work->dependency_count; i++) {
    struct dependency *on = &work->dependencies[i];
    while (on->stream->done < on->number) pthread_cond_wait(&progress, &the_lock);
    release_stream(on->stream);
  }
  free(work->dependencies);
  work->dependencies = NULL;
  work->dependency_count = 0;
}

static void free_work(struct work *work) {
  for (int i = 0; i < work->dependency_count; i++) release_stream(work->dependencies[i].stream);
  if (work->release) work->release(work);
  free(work->dependencies);
  free(work);
}

static void be_late(void) {
  uint64_t us = settings.delay_us;
  struct timespec time = {(time_t)(us / 1000000), (long)(us % 1000000) * 1000};
  if (us) nanosleep(&time, NULL);
}

static void *work_through(void *argument) {
  struct stream *stream = argument;
  lock();
  the_process = stream->process;
  while (stream->first || !stream->is_destroyed) {
    struct work *work = stream->first;
    if (!work) {
      pthread_cond_wait(&stream->has_work, &the_lock);
      continue;
    }
    wait_for_dependencies(work);
    CUresult before = stream->context->error;
    unlock(0);
    if (work->is_late) be_late();
    int is_skipped = stream->is_ended || (before && work->is_late); /* after an error, no kernel runs */
    CUresult result = is_skipped ? CUDA_SUCCESS : work->run(work, stream);
    lock();
    if (result && !stream->context->error) stream->context->error = result;
    stream->first = work->next;
    if (!stream->first) stream->last = NULL;
    stream->done = work->number;
    free_work(work);
    pthread_cond_broadcast(&progress);
  }
  stream->has_thread = 0;
  free_if_unused(stream);
  unlock(0);
  return NULL;
}

static int start(struct stream *stream) {
  if (stream->has_thread) return 1;
  pthread_t thread;
  stream->has_thread = !pthread_create(&thread, NULL, work_through, stream);
  if (stream->has_thread) pthread_detach(thread);
  return stream->has_thread;
}

CUresult put_work(struct stream *stream, struct work *work) {
  CUresult refused = stream->capture ? CUDA_SUCCESS : implicit_capture(stream);
  if (stream->capture && stream->is_capture_invalid) refused = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (refused || stream->capture) { /* captured work is not done */
    free_work(work);
    return refused;
  }
  if (stream->kind == LEGACY) depend_on_blocking(work, stream->context);
  else if (is_blocking(stream) && stream->context->legacy) depend_on_now(work, stream->context->legacy);
  if (!start(stream)) {
    free_work(work);
    return CUDA_ERROR_OPERATING_SYSTEM;
  }
  work->number = ++stream->put;
  work->next = NULL;
  if (stream->last) stream->last->next = work;
  else stream->first = work;
  stream->last = work;
  pthread_cond_signal(&stream->has_work);
  return CUDA_SUCCESS;
}

static struct stream *new_stream(struct context *context, enum stream_kind kind, unsigned flags) {
  struct stream *stream = calloc(1, sizeof *stream);
  stream->handle = (CUstream)0x5f000000000 + new_number() * 16;
  stream->context = context;
  stream->process = context->process;
  stream->kind = kind;
  stream->flags = flags;
  stream->owner = pthread_self();
  pthread_cond_init(&stream->has_work, NULL);
  stream->next = all_streams;
  return all_streams = stream;
}

static struct stream *of_this_thread(struct context *context) {
  for (struct stream *one = all_streams; one; one = one->next)
    if (one->kind == PER_THREAD && one->context == context && pthread_equal(one->owner, pthread_self())) return one;
  return new_stream(context, PER_THREAD, 0);
}

struct stream *marker_of(struct context *context) {
  if (!context->marker) context->marker = new_stream(context, MARKER, STREAM_NON_BLOCKING);
  return context->marker;
}

static struct stream *named(CUstream handle) {
  for (struct stream *one = all_streams; one; one = one->next)
    if (one->handle == handle && one->process == the_process && one->kind == NAMED && !one->is_destroyed) return one;
  return NULL;
}

CUresult find_stream(CUstream handle, struct stream **stream) {
  struct context *context;
  CUresult result = current_context(&context);
  if (result) return result;
  if (handle == 0 || handle == 1) {
    if (!context->legacy) context->legacy = new_stream(context, LEGACY, 0);
    *stream = context->legacy;
  } else {
    *stream = handle == 2 ? of_this_thread(context) : named(handle);
  }
  if (*stream) return (*stream)->context->error;
  violation("a stream was used that is destroyed, or never was");
  return CUDA_ERROR_INVALID_HANDLE;
}

static void depend_on_stream(struct work *work, struct stream *stream) {
  depend_on_now(work, stream);
  if (stream->kind == LEGACY) depend_on_blocking(work, stream->context);
}

void wait_for_stream(struct stream *stream) {
  struct work waiting = {0};
  depend_on_stream(&waiting, stream);
  wait_for_dependencies(&waiting);
}

void wait_for_context(struct context *context) {
  struct work waiting = {0};
  for (struct stream *one = all_streams; one; one = one->next)
    if (one->context == context) depend_on_now(&waiting, one);
  wait_for_dependencies(&waiting);
  context->waits++;
}

int is_at_work(struct context *context) {
  for (struct stream *one = all_streams; one; one = one->next)
    if (one->context == context && one->done < one->put) return 1;
  return 0;
}

int is_stream_done(struct stream *stream) {
  if (stream->kind == LEGACY)
    for (struct stream *one = all_streams; one; one = one->next)
      if (one->context == stream->context && is_blocking(one) && one->done < one->put) return 0;
  return stream->done >= stream->put;
}

void end_streams(int process) {
  for (struct stream *one = all_streams; one; one = one->next)
    if (one->process == process) {
      one->is_destroyed = one->is_ended = 1;
      pthread_cond_signal(&one->has_work);
    }
}

int live_streams(int process) {
  int count = 0;
  for (struct stream *one = all_streams; one; one = one->next)
    count += one->kind == NAMED && !one->is_destroyed && (process < 0 || one->process == process);
  return count;
}

EXPORT CUresult cuStreamCreateWithPriority(CUstream *handle, unsigned flags, int priority) {
  ENTER("cuStreamCreateWithPriority");
  if (!handle || flags & ~1u) return CUDA_ERROR_INVALID_VALUE;
  lock();
  struct context *context;
  CHECK(current_context(&context));
  struct stream *stream = new_stream(context, NAMED, flags);
  stream->priority = priority;
  *handle = stream->handle;
  return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuStreamCreate(CUstream *handle, unsigned flags) {
  ENTER("cuStreamCreate");
  if (!handle || flags & ~1u) return CUDA_ERROR_INVALID_VALUE;
  lock();
  struct context *context;
  CHECK(current_context(&context));
  *handle = new_stream(context, NAMED, flags)->handle;
  return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuStreamDestroy_v2(CUstream handle) { /* at once: its work is still done */
  ENTER("cuStreamDestroy");
  lock();
  struct stream *stream = named(handle);
  REFUSE_IF(!stream, CUDA_ERROR_INVALID_HANDLE);
  stream->is_destroyed = 1;
  pthread_cond_signal(&stream->has_work);
  free_if_unused(stream);
  return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuStreamSynchronize(CUstream handle) {
  ENTER("cuStreamSynchronize");
  lock();
  struct stream *stream;
  CHECK(find_stream(handle, &stream));
  CHECK(refuse_in_capture(stream));
  struct context *context = stream->context;
  wait_for_stream(stream);
  return unlock(context->error);
}

EXPORT CUresult cuStreamQuery(CUstream handle) {
  ENTER("cuStreamQuery");
  lock();
  struct stream *stream;
  CHECK(find_stream(handle, &stream));
  CHECK(refuse_in_capture(stream));
  return unlock(is_stream_done(stream) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

EXPORT CUresult cuStreamGetCtx(CUstream handle, CUcontext *context) {
  ENTER("cuStreamGetCtx");
  lock();
  struct stream *stream;
  CHECK(find_stream(handle, &stream));
  *context = stream->context;
  return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuStreamGetCtx_v2(CUstream handle, CUcontext *context, void **green) { /* from 12.5 */
  if (green) *green = NULL;
  return cuStreamGetCtx(handle, context);
}

EXPORT CUresult cuStreamGetDevice(CUstream handle, CUdevice *device) {
  ENTER("cuStreamGetDevice");
  lock();
  struct stream *stream;
  CHECK(find_stream(handle, &stream));
  *device = stream->context->device;
  return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuStreamGetFlags(CUstream handle, unsigned *flags) {
  ENTER("cuStreamGetFlags");
  lock();
  struct stream *stream;
  CHECK(find_stream(handle, &stream));
  *flags = stream->flags;
  return unlock(CUDA_SUCCESS);
}
