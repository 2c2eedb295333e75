/* CUDA's attributes of an address. */
#include "driver.h"

enum { CONTEXT = 1, MEMORY_TYPE, DEVICE_POINTER, HOST_POINTER, P2P_TOKENS, SYNC_MEMOPS, BUFFER_ID, IS_MANAGED,
       DEVICE_ORDINAL, IS_LEGACY_CUDA_IPC_CAPABLE, RANGE_START_ADDR, RANGE_SIZE, MAPPED, ALLOWED_HANDLE_TYPES };
enum { HOST_TYPE = 1, DEVICE_TYPE = 2 };

static CUresult attribute_of(struct range *range, int attribute, uintptr_t address, void *value) {
  struct block *block = range->block;
  int reaches_host = block->kind == PINNED || block->kind == MANAGED;
  switch (attribute) {
    case CONTEXT: *(CUcontext *)value = context_of(block->process, block->device); break;
    case MEMORY_TYPE: *(unsigned *)value = block->kind == PINNED ? HOST_TYPE : DEVICE_TYPE; break;
    case DEVICE_POINTER: *(uintptr_t *)value = address; break;
    case HOST_POINTER:
      if (!reaches_host) return CUDA_ERROR_INVALID_VALUE;
      *(uintptr_t *)value = address;
      break;
    case SYNC_MEMOPS: *(int *)value = 0; break;
    case BUFFER_ID: *(uint64_t *)value = range->id; break;
    case IS_MANAGED: *(int *)value = block->kind == MANAGED; break;
    case DEVICE_ORDINAL: *(int *)value = block->device; break;
    case IS_LEGACY_CUDA_IPC_CAPABLE: *(int *)value = block->kind == OWN; break;
    case RANGE_START_ADDR: *(uintptr_t *)value = range->address; break;
    case RANGE_SIZE: *(size_t *)value = range->size; break;
    case MAPPED: *(int *)value = range->is_accessible; break;
    case ALLOWED_HANDLE_TYPES: *(uint64_t *)value = block->kind == VIRTUAL; break;
    default: return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address) {
  ENTER("cuPointerGetAttribute");
  lock();
  struct range *range = range_at(the_process, address);
  return unlock(range ? attribute_of(range, attribute, address, value) : CUDA_ERROR_INVALID_VALUE);
}

static void say_nothing(int attribute, void *value) { /* of memory that CUDA does not know */
  switch (attribute) {
    case MEMORY_TYPE: case SYNC_MEMOPS: case IS_MANAGED: case IS_LEGACY_CUDA_IPC_CAPABLE: case MAPPED:
      *(int *)value = 0;
      break;
    case DEVICE_ORDINAL: *(int *)value = -2; break; /* CU_DEVICE_INVALID */
    default: *(uint64_t *)value = 0;
  }
}

EXPORT CUresult cuPointerGetAttributes(unsigned count, int *attributes, void **values, CUdeviceptr address) {
  ENTER("cuPointerGetAttributes");
  lock();
  struct range *range = range_at(the_process, address);
  for (unsigned i = 0; i < count; i++) {
    REFUSE_IF(attributes[i] < CONTEXT || attributes[i] > ALLOWED_HANDLE_TYPES, CUDA_ERROR_INVALID_VALUE);
    if (!range || attribute_of(range, attributes[i], address, values[i])) say_nothing(attributes[i], values[i]);
  }
  return unlock(CUDA_SUCCESS);
}
