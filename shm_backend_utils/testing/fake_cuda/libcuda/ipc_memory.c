/* Handles of memory: exporting, opening in other processes, closing. */
#include "driver.h"
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

EXPORT CUresult cuIpcGetMemHandle(struct ipc_handle *handle, CUdeviceptr address) {
  ENTER("cuIpcGetMemHandle");
  lock();
  struct context *context;
  CHECK(current_context(&context));
  struct range *range = range_at(the_process, address);
  REFUSE_IF(!range || range->block->kind != OWN, CUDA_ERROR_INVALID_VALUE);
  struct block *block = range->block;
  struct export *export = add_export(block->control, range->id);
  REFUSE_IF(!export, CUDA_ERROR_OUT_OF_MEMORY);
  fill_handle(handle, block->device, block->fd, block->nonce);
  handle->export_id = range->id;
  handle->offset = (uint32_t)(range->address - block->address);
  return unlock(CUDA_SUCCESS);
}

static void take_time(void) {
  if (!forgives(OPENINGS)) usleep((useconds_t)settings.ipc_us);
}

static struct block *opened_block(uint64_t nonce) {
  for (struct range *range = all_ranges; range; range = range->next)
    if (range->block->kind == OPENED && range->block->process == the_process && range->block->nonce == nonce)
      return range->block;
  return NULL;
}

static struct block *map_block(int fd, int device, uint64_t nonce) {
  struct stat status;
  if (fstat(fd, &status) || status.st_size <= CONTROL_BYTES) return NULL;
  struct block *block = new_block(OPENED, device, (size_t)status.st_size - CONTROL_BYTES);
  block->nonce = nonce;
  block->address = reserve(block->size);
  if (block->address) {
    block->view = mmap(NULL, (size_t)status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (block->view != MAP_FAILED) {
      block->control = (struct control *)(block->view + block->size);
      return block;
    }
    munmap((void *)block->address, block->size);
  }
  free(block);
  return NULL;
}

static void unmap_block(struct block *block) { /* that has no range yet */
  munmap(block->view, block->size + CONTROL_BYTES);
  munmap((void *)block->address, block->size);
  free(block);
}

/* Counts one more opening of a handle's memory, which has the same address each time it is opened. */
static CUresult count_opening(struct block *block, const struct ipc_handle *handle, CUdeviceptr *address) {
  struct export *export = find_export(block->control, handle->export_id);
  if (!export || export->is_freed) return CUDA_ERROR_INVALID_HANDLE;
  *address = block->address + handle->offset;
  for (struct opening *one = block->openings; one; one = one->next)
    if (one->export == export) {
      one->count++;
      return CUDA_SUCCESS;
    }
  struct opener *opener = add_opener(block->control, export);
  if (!opener) return CUDA_ERROR_TOO_MANY_PEERS;
  struct opening *opening = calloc(1, sizeof *opening);
  *opening = (struct opening){block->openings, export, opener, *address, 1};
  block->openings = opening;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, struct ipc_handle handle, unsigned flags) {
  ENTER("cuIpcOpenMemHandle");
  if (!address || flags != 1) return CUDA_ERROR_INVALID_VALUE; /* CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS is required */
  take_time();
  lock();
  struct context *context;
  CHECK(current_context(&context));
  CHECK(refuse_while_capturing(context));
  int fd, device;
  CHECK(open_file(&handle, &fd, &device));
  struct block *block = opened_block(handle.nonce);
  int is_new = !block;
  if (is_new) block = map_block(fd, device, handle.nonce);
  close(fd);
  REFUSE_IF(!block, CUDA_ERROR_MAP_FAILED);
  CUresult result = count_opening(block, &handle, address);
  if (is_new && result) unmap_block(block);
  if (is_new && !result) add_range(block, block->address, block->size);
  return unlock(result);
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
  ENTER("cuIpcCloseMemHandle");
  take_time();
  lock();
  struct context *context;
  CHECK(current_context(&context));
  struct range *range = range_at(the_process, address);
  REFUSE_IF(!range || range->block->kind != OPENED, CUDA_ERROR_INVALID_VALUE);
  if (!forgives(WAITS)) wait_for_context(context_of(the_process, range->block->device));
  range = range_at(the_process, address);
  REFUSE_IF(!range, CUDA_ERROR_INVALID_VALUE);
  struct opening **at = &range->block->openings;
  while (*at && (*at)->address != address) at = &(*at)->next;
  struct opening *opening = *at;
  REFUSE_IF(!opening, CUDA_ERROR_INVALID_VALUE);
  if (__atomic_load_n(&opening->export->is_freed, __ATOMIC_ACQUIRE))
    violation("memory was closed after its owner had freed it");
  if (--opening->count) return unlock(CUDA_SUCCESS);
  __atomic_store_n(&opening->opener->who, 0, __ATOMIC_RELEASE);
  *at = opening->next;
  free(opening);
  if (!range->block->openings) remove_range(range);
  return unlock(CUDA_SUCCESS);
}
