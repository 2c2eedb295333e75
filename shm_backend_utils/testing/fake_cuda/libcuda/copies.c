/* Copies and fills, with unified addresses, which are resolved only when a copy is done. */
#include "driver.h"

struct side { uintptr_t address; size_t pitch; };
struct copy_work {
  struct work work;
  struct side target, source;
  size_t width, height;
  char *staged; /* pageable source: its bytes when the copy was asked for */
};
struct fill_work { struct work work; uintptr_t address; size_t count; unsigned value; int item; };

static size_t span(struct side side, size_t width, size_t height) {
  return width && height ? side.pitch * (height - 1) + width : 0;
}

static CUresult copy_now(struct work *work, struct stream *stream) {
  struct copy_work *copy = (struct copy_work *)work;
  struct place target = {NULL, NULL}, source = {NULL, copy->staged};
  lock();
  size_t written = span(copy->target, copy->width, copy->height), read = span(copy->source, copy->width, copy->height);
  CUresult result = resolve(stream->process, copy->target.address, written, &target);
  if (!result && !copy->staged) result = resolve(stream->process, copy->source.address, read, &source);
  unlock(0);
  for (size_t row = 0; !result && row < copy->height; row++)
    memmove(target.bytes + row * copy->target.pitch, source.bytes + row * copy->source.pitch, copy->width);
  lock();
  release_place(&target);
  release_place(&source);
  return unlock(result);
}

static void release_copy(struct work *work) { free(((struct copy_work *)work)->staged); }

static int is_pageable(uintptr_t address) { return !range_at(the_process, address); }

static int is_device(uintptr_t address) {
  struct range *range = range_at(the_process, address);
  return range && range->block->kind != PINNED && range->block->kind != MANAGED;
}

/* Puts a copy on a stream. As CUDA documents it, pageable memory is read at once, or written before this returns. */
static CUresult put_copy(struct stream *stream, struct side target, struct side source, size_t width, size_t height) {
  if (!width || !height) return CUDA_SUCCESS;
  if (height > 1 && (target.pitch < width || source.pitch < width)) return CUDA_ERROR_INVALID_VALUE;
  struct copy_work *copy = calloc(1, sizeof *copy);
  *copy = (struct copy_work){.target = target, .source = source, .width = width, .height = height};
  copy->work.is_late = 1;
  copy->work.run = copy_now;
  copy->work.release = release_copy;
  struct place place;
  size_t bytes = span(source, width, height);
  int is_written_here = is_pageable(target.address) && !stream->capture;
  if (is_pageable(source.address) && !stream->capture && !resolve(the_process, source.address, bytes, &place)) {
    copy->staged = malloc(bytes);
    memcpy(copy->staged, place.bytes, bytes);
  }
  struct context *context = stream->context; /* the stream may be destroyed while this waits */
  CUresult result = put_work(stream, &copy->work);
  if (!result && is_written_here) wait_for_stream(stream);
  return result ? result : context->error;
}

/* A copy without a stream: on the legacy one; the host waits, except for copies within devices. */
static CUresult copy_and_wait(struct side target, struct side source, size_t width, size_t height) {
  struct stream *stream;
  CUresult result = find_stream(0, &stream);
  if (!result) result = refuse_while_capturing(stream->context);
  int is_waited_for = !(is_device(target.address) && is_device(source.address));
  if (!result) result = put_copy(stream, target, source, width, height);
  if (result) return result;
  if (is_waited_for) wait_for_stream(stream);
  return stream->context->error;
}

#define SIDE(address, pitch) ((struct side){(uintptr_t)(address), pitch})

static CUresult copy_line(uintptr_t target, uintptr_t source, size_t size) {
  lock();
  return unlock(copy_and_wait(SIDE(target, size), SIDE(source, size), size, 1));
}

static CUresult copy_line_on(uintptr_t target, uintptr_t source, size_t size, CUstream handle) {
  lock();
  struct stream *stream;
  CHECK(find_stream(handle, &stream));
  return unlock(put_copy(stream, SIDE(target, size), SIDE(source, size), size, 1));
}

EXPORT CUresult cuMemcpy(CUdeviceptr target, CUdeviceptr source, size_t size) {
  ENTER("cuMemcpy");
  return copy_line(target, source, size);
}
EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void *source, size_t size) {
  ENTER("cuMemcpyHtoD");
  return copy_line(target, (uintptr_t)source, size);
}
EXPORT CUresult cuMemcpyDtoH_v2(void *target, CUdeviceptr source, size_t size) {
  ENTER("cuMemcpyDtoH");
  return copy_line((uintptr_t)target, source, size);
}
EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr target, CUdeviceptr source, size_t size) {
  ENTER("cuMemcpyDtoD");
  return copy_line(target, source, size);
}
EXPORT CUresult cuMemcpyPeer(CUdeviceptr target, CUcontext target_context, CUdeviceptr source, CUcontext source_context,
                             size_t size) {
  ENTER("cuMemcpyPeer");
  lock();
  CHECK(known_context(target_context));
  CHECK(known_context(source_context));
  return unlock(copy_and_wait(SIDE(target, size), SIDE(source, size), size, 1));
}
EXPORT CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t size, CUstream stream) {
  ENTER("cuMemcpyAsync");
  return copy_line_on(target, source, size, stream);
}
EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void *source, size_t size, CUstream stream) {
  ENTER("cuMemcpyHtoDAsync");
  return copy_line_on(target, (uintptr_t)source, size, stream);
}
EXPORT CUresult cuMemcpyDtoHAsync_v2(void *target, CUdeviceptr source, size_t size, CUstream stream) {
  ENTER("cuMemcpyDtoHAsync");
  return copy_line_on((uintptr_t)target, source, size, stream);
}
EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr target, CUdeviceptr source, size_t size, CUstream stream) {
  ENTER("cuMemcpyDtoDAsync");
  return copy_line_on(target, source, size, stream);
}
EXPORT CUresult cuMemcpyPeerAsync(CUdeviceptr target, CUcontext target_context, CUdeviceptr source,
                                  CUcontext source_context, size_t size, CUstream handle) {
  ENTER("cuMemcpyPeerAsync");
  lock();
  struct stream *stream;
  CHECK(known_context(target_context));
  CHECK(known_context(source_context));
  CHECK(find_stream(handle, &stream));
  return unlock(put_copy(stream, SIDE(target, size), SIDE(source, size), size, 1));
}

enum { HOST_MEMORY = 1, DEVICE_MEMORY = 2, UNIFIED_MEMORY = 4 };
struct rectangle { size_t x, y; int type; const void *host; CUdeviceptr device; void *array; size_t pitch; };
struct copy_2d { struct rectangle source, target; size_t width, height; };

static CUresult side_of(const struct rectangle *one, size_t width, struct side *side) {
  int is_known = one->type == HOST_MEMORY || one->type == DEVICE_MEMORY || one->type == UNIFIED_MEMORY;
  if (!is_known) return CUDA_ERROR_INVALID_VALUE;
  size_t pitch = one->pitch ? one->pitch : width + one->x;
  if (pitch < width + one->x || pitch > settings.max_pitch) return CUDA_ERROR_INVALID_VALUE;
  uintptr_t start = one->type == HOST_MEMORY ? (uintptr_t)one->host : one->device;
  *side = SIDE(start + one->y * pitch + one->x, pitch);
  return CUDA_SUCCESS;
}

static CUresult sides_of(const struct copy_2d *copy, struct side *target, struct side *source) {
  CUresult result = side_of(&copy->target, copy->width, target);
  return result ? result : side_of(&copy->source, copy->width, source);
}

static CUresult copy_rows(const struct copy_2d *copy) {
  lock();
  struct side target, source;
  CHECK(sides_of(copy, &target, &source));
  return unlock(copy_and_wait(target, source, copy->width, copy->height));
}

EXPORT CUresult cuMemcpy2D_v2(const struct copy_2d *copy) {
  ENTER("cuMemcpy2D");
  return copy_rows(copy);
}

EXPORT CUresult cuMemcpy2DUnaligned_v2(const struct copy_2d *copy) {
  ENTER("cuMemcpy2DUnaligned");
  return copy_rows(copy);
}

EXPORT CUresult cuMemcpy2DAsync_v2(const struct copy_2d *copy, CUstream handle) {
  ENTER("cuMemcpy2DAsync");
  lock();
  struct side target, source;
  struct stream *stream;
  CHECK(sides_of(copy, &target, &source));
  CHECK(find_stream(handle, &stream));
  return unlock(put_copy(stream, target, source, copy->width, copy->height));
}

static CUresult fill_now(struct work *work, struct stream *stream) {
  struct fill_work *fill = (struct fill_work *)work;
  struct place place;
  lock();
  CUresult result = resolve(stream->process, fill->address, fill->count * (size_t)fill->item, &place);
  unlock(0);
  if (!result && fill->item == 1) memset(place.bytes, (int)fill->value, fill->count);
  for (size_t i = 0; !result && fill->item == 4 && i < fill->count; i++) memcpy(place.bytes + i * 4, &fill->value, 4);
  lock();
  if (!result) release_place(&place);
  return unlock(result);
}

static CUresult put_fill(CUdeviceptr address, unsigned value, size_t count, int item, CUstream handle) {
  if (address % (size_t)item) return CUDA_ERROR_INVALID_VALUE;
  lock();
  struct stream *stream;
  CHECK(find_stream(handle, &stream));
  struct fill_work *fill = calloc(1, sizeof *fill);
  *fill = (struct fill_work){.address = address, .count = count, .value = value, .item = item};
  fill->work.is_late = 1;
  fill->work.run = fill_now;
  return unlock(put_work(stream, &fill->work)); /* the host does not wait */
}

EXPORT CUresult cuMemsetD8_v2(CUdeviceptr address, unsigned char value, size_t count) {
  ENTER("cuMemsetD8");
  return put_fill(address, value, count, 1, 0);
}
EXPORT CUresult cuMemsetD32_v2(CUdeviceptr address, unsigned value, size_t count) {
  ENTER("cuMemsetD32");
  return put_fill(address, value, count, 4, 0);
}
EXPORT CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t count, CUstream stream) {
  ENTER("cuMemsetD8Async");
  return put_fill(address, value, count, 1, stream);
}
EXPORT CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value, size_t count, CUstream stream) {
  ENTER("cuMemsetD32Async");
  return put_fill(address, value, count, 4, stream);
}
