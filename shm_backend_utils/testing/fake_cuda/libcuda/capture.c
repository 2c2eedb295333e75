/* Capture of streams: work put on one is not done; a call not allowed meanwhile fails, and invalidates the capture. */
#include "driver.h"

enum { GLOBAL_MODE, THREAD_LOCAL_MODE, RELAXED_MODE };
static __thread int thread_mode = GLOBAL_MODE;

static void spoil(uint64_t capture) {
  for (struct stream *one = all_streams; one; one = one->next)
    if (one->capture == capture) one->is_capture_invalid = 1;
}

static struct stream *captured_before(struct stream *stream) { /* a captured stream that the legacy one waits for */
  struct stream *one = stream->kind == LEGACY ? all_streams : NULL;
  while (one && (one->context != stream->context || !one->capture || one->flags & STREAM_NON_BLOCKING)) one = one->next;
  return one;
}

CUresult implicit_capture(struct stream *stream) {
  struct stream *captured = captured_before(stream);
  if (!captured) return CUDA_SUCCESS;
  spoil(captured->capture);
  return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
}

CUresult refuse_in_capture(struct stream *stream) {
  if (!stream->capture) return implicit_capture(stream);
  spoil(stream->capture);
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult refuse_while_capturing(struct context *context) {
  if (thread_mode == RELAXED_MODE) return CUDA_SUCCESS;
  for (struct stream *one = all_streams; one; one = one->next) {
    if (!one->capture || one->process != context->process || one->capture_mode == RELAXED_MODE) continue;
    int is_ours = pthread_equal(one->capture_thread, pthread_self());
    if (!is_ours && (one->capture_mode == THREAD_LOCAL_MODE || thread_mode == THREAD_LOCAL_MODE)) continue;
    spoil(one->capture);
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return CUDA_SUCCESS;
}

CUresult end_captures(struct context *context) {
  if (forgives(CAPTURES)) return refuse_while_capturing(context);
  CUresult result = CUDA_SUCCESS;
  for (struct stream *one = all_streams; one; one = one->next) {
    if (one->context != context || !one->capture) continue;
    spoil(one->capture);
    result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return result;
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
  ENTER("cuThreadExchangeStreamCaptureMode");
  if (!mode || *mode < GLOBAL_MODE || *mode > RELAXED_MODE) return CUDA_ERROR_INVALID_VALUE;
  int before = thread_mode;
  thread_mode = *mode;
  *mode = before;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamBeginCapture_v2(CUstream handle, int mode) {
  ENTER("cuStreamBeginCapture");
  if (mode < GLOBAL_MODE || mode > RELAXED_MODE) return CUDA_ERROR_INVALID_VALUE;
  lock();
  struct stream *stream;
  CHECK(find_stream(handle, &stream));
  REFUSE_IF(stream->kind == LEGACY, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  REFUSE_IF(stream->capture, CUDA_ERROR_ILLEGAL_STATE);
  stream->capture = new_number();
  stream->capture_mode = mode;
  stream->capture_thread = pthread_self();
  stream->is_capture_origin = 1;
  stream->is_capture_invalid = 0;
  return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuStreamEndCapture(CUstream handle, uintptr_t *graph) {
  ENTER("cuStreamEndCapture");
  lock();
  struct stream *stream;
  CHECK(find_stream(handle, &stream));
  REFUSE_IF(!stream->capture, CUDA_ERROR_ILLEGAL_STATE);
  REFUSE_IF(!stream->is_capture_origin, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
  REFUSE_IF(stream->capture_mode != RELAXED_MODE && !pthread_equal(stream->capture_thread, pthread_self()),
            CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
  uint64_t capture = stream->capture;
  int is_invalid = stream->is_capture_invalid;
  for (struct stream *one = all_streams; one; one = one->next)
    if (one->capture == capture) one->capture = 0, one->is_capture_origin = 0;
  *graph = is_invalid ? 0 : (uintptr_t)0x66000000000 + capture * 16;
  return unlock(is_invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS);
}

EXPORT CUresult cuGraphDestroy(uintptr_t graph) {
  ENTER("cuGraphDestroy");
  return graph ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult capture_info(CUstream handle, int *status, uint64_t *id) {
  lock();
  struct stream *stream;
  CHECK(find_stream(handle, &stream));
  REFUSE_IF(captured_before(stream), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT); /* asking ends no capture */
  *status = stream->capture ? 1 + stream->is_capture_invalid : 0;
  if (id && stream->capture) *id = stream->capture;
  return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuStreamIsCapturing(CUstream handle, int *status) {
  ENTER("cuStreamIsCapturing");
  return capture_info(handle, status, NULL);
}

EXPORT CUresult cuStreamGetCaptureInfo_v2(CUstream handle, int *status, uint64_t *id, uintptr_t *graph,
                                          const void **dependencies, size_t *count) {
  ENTER("cuStreamGetCaptureInfo");
  if (graph) *graph = 0;
  if (dependencies) *dependencies = NULL;
  if (count) *count = 0;
  return capture_info(handle, status, id);
}

EXPORT CUresult cuStreamGetCaptureInfo_v3(CUstream handle, int *status, uint64_t *id, uintptr_t *graph,
                                          const void **dependencies, const void **edges, size_t *count) {
  if (edges) *edges = NULL;
  return cuStreamGetCaptureInfo_v2(handle, status, id, graph, dependencies, count);
}
