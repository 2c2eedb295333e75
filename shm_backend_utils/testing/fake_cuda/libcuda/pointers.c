/* What CUDA says of an address; and what tests may see: the bytes behind it, and what is not given back. */
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

/* Returns where the bytes of an address are for host code; NULL if there are not so many. */
EXPORT char *fake_cuda_memory(uintptr_t address, size_t size) {
  lock();
  struct place place = {NULL, NULL};
  for (int process = 0; process < PROCESSES && !place.block; process++)
    if (range_at(process, address) && resolve(process, address, size, &place)) break;
  char *bytes = place.block ? place.bytes : NULL;
  release_place(&place);
  unlock(0);
  return bytes;
}

EXPORT void fake_cuda_end(int process) {
  lock();
  end_streams(process);
  end_events(process);
  end_ranges(process);
  end_contexts(process);
  unlock(0);
}

/* allocations, openings, events, streams, pinned ranges: of a virtual process, or of all (-1) */
EXPORT void fake_cuda_live(int process, int counts[5]) {
  lock();
  memset(counts, 0, 5 * sizeof *counts);
  for (struct range *range = all_ranges; range; range = range->next) {
    struct block *block = range->block;
    if (process >= 0 && block->process != process) continue;
    counts[0] += block->kind != OPENED && block->kind != PINNED;
    counts[4] += block->kind == PINNED;
    for (struct opening *one = block->openings; one; one = one->next) counts[1] += one->count;
  }
  counts[2] = live_events(process);
  counts[3] = live_streams(process);
  unlock(0);
}
