/* Allocations: cuMemAlloc, whose small ones share blocks of 2 MiB; managed memory; the stream-ordered pool. */
#include "driver.h"
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#define ALIGNMENT ((size_t)512)

static size_t rounded(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

static int is_over_limit(int device, size_t size) {
  return size > settings.memory_bytes || bytes_in_use(device) > settings.memory_bytes - size;
}

/* A block in a file of its own, with the control pages behind it. */
static struct block *mapped_block(enum block_kind kind, int device, size_t size) {
  struct block *block = new_block(kind, device, size);
  block->nonce = new_nonce();
  block->fd = new_file(block->nonce, size + CONTROL_BYTES);
  block->address = block->fd < 0 ? 0 : reserve(size);
  if (block->address) {
    int flags = MAP_SHARED | (size <= MOST_RUBBISH ? MAP_POPULATE : 0); /* all of it will be written at once */
    block->view = mmap(NULL, size + CONTROL_BYTES, PROT_READ | PROT_WRITE, flags, block->fd, 0);
    if (block->view != MAP_FAILED) {
      block->control = (struct control *)(block->view + size);
      block->control->nonce = block->nonce;
      return block;
    }
    munmap((void *)block->address, size);
  }
  if (block->fd >= 0) close(block->fd);
  free(block);
  return NULL;
}

static struct block *block_with_room(int device, size_t size) {
  for (struct range *range = all_ranges; range; range = range->next) {
    struct block *block = range->block;
    if (block->kind == OWN && block->process == the_process && block->device == device && block->next_offset &&
        block->size - block->next_offset >= size)
      return block;
  }
  return NULL;
}

static struct range *allocate(enum block_kind kind, int device, size_t size) {
  int is_small = kind == OWN && size < BLOCK_BYTES;
  size_t taken = rounded(size, ALIGNMENT);
  struct block *block = is_small ? block_with_room(device, taken) : NULL;
  if (!block) {
    size_t whole = rounded(size, BLOCK_BYTES);
    if (is_over_limit(device, whole)) return NULL;
    block = mapped_block(kind, device, whole);
    if (!block) return NULL;
  }
  struct range *range = add_range(block, block->address + block->next_offset, is_small ? taken : size);
  block->next_offset += is_small ? taken : 0;
  fill_with_rubbish(range);
  return range;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size) {
  ENTER("cuMemAlloc");
  if (!address || !size) return CUDA_ERROR_INVALID_VALUE;
  lock();
  struct context *context;
  CHECK(current_context(&context));
  CHECK(refuse_while_capturing(context));
  struct range *range = allocate(OWN, context->device, size);
  REFUSE_IF(!range, CUDA_ERROR_OUT_OF_MEMORY);
  *address = range->address;
  return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *address, size_t size, unsigned flags) {
  ENTER("cuMemAllocManaged");
  if (!address || !size || (flags != 1 && flags != 2)) return CUDA_ERROR_INVALID_VALUE;
  lock();
  struct context *context;
  CHECK(current_context(&context));
  CHECK(refuse_while_capturing(context));
  REFUSE_IF(is_over_limit(context->device, size), CUDA_ERROR_OUT_OF_MEMORY);
  size_t whole = rounded(size, 4096);
  char *memory = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REFUSE_IF(memory == MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
  struct block *block = new_block(MANAGED, context->device, whole);
  block->address = (uintptr_t)memory;
  block->view = memory; /* host code reaches it, too */
  fill_with_rubbish(add_range(block, block->address, size));
  *address = block->address;
  return unlock(CUDA_SUCCESS);
}

static void tell_openers(struct range *range) {
  struct control *control = range->block->control;
  struct export *export = control ? find_export(control, range->id) : NULL;
  if (!export) return;
  __atomic_store_n(&export->is_freed, 1, __ATOMIC_RELEASE);
  int living = living_openers(control, export);
  if (living) violation("memory was freed that others have open (%d)", living);
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr address) {
  ENTER("cuMemFree");
  if (!address) return CUDA_SUCCESS;
  lock();
  struct context *context;
  CHECK(current_context(&context));
  CHECK(refuse_while_capturing(context));
  struct range *range = range_at(the_process, address);
  REFUSE_IF(!range || range->address != address || range->block->kind > POOL || range->block->kind == OPENED,
            CUDA_ERROR_INVALID_VALUE);
  if (!forgives(WAITS)) wait_for_context(context_of(the_process, range->block->device));
  range = range_at(the_process, address);
  REFUSE_IF(!range || range->address != address, CUDA_ERROR_INVALID_VALUE);
  tell_openers(range);
  remove_range(range);
  return unlock(context->error);
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
  ENTER("cuMemGetAddressRange");
  lock();
  struct context *context;
  CHECK(current_context(&context));
  struct range *range = range_at(the_process, address);
  REFUSE_IF(!range || range->block->kind == PINNED, CUDA_ERROR_NOT_FOUND);
  if (base) *base = range->address;
  if (size) *size = range->size;
  return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
  ENTER("cuMemGetInfo");
  lock();
  struct context *context;
  CHECK(current_context(&context));
  *total = settings.memory_bytes;
  *free_bytes = settings.memory_bytes - bytes_in_use(context->device);
  return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuMemAllocAsync(CUdeviceptr *address, size_t size, CUstream handle) {
  ENTER("cuMemAllocAsync");
  if (!address || !size) return CUDA_ERROR_INVALID_VALUE;
  lock();
  struct stream *stream;
  CHECK(find_stream(handle, &stream));
  struct range *range = allocate(POOL, stream->context->device, size);
  REFUSE_IF(!range, CUDA_ERROR_OUT_OF_MEMORY);
  *address = range->address;
  return unlock(CUDA_SUCCESS);
}

struct free_work { struct work work; CUdeviceptr address; };

static CUresult free_on_stream(struct work *work, struct stream *stream) {
  lock();
  struct range *range = range_at(stream->process, ((struct free_work *)work)->address);
  if (range) remove_range(range);
  return unlock(range ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS);
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
  ENTER("cuMemFreeAsync");
  lock();
  struct stream *stream;
  CHECK(find_stream(handle, &stream));
  struct range *range = range_at(the_process, address);
  REFUSE_IF(!range || range->address != address || range->block->kind != POOL, CUDA_ERROR_INVALID_VALUE);
  struct free_work *work = calloc(1, sizeof *work);
  work->work.run = free_on_stream;
  work->address = address;
  return unlock(put_work(stream, &work->work));
}
