/* Host memory that the driver has pinned: registered, or allocated by it. */
#include "driver.h"
#include <stdio.h>
#include <sys/mman.h>

enum { READ_ONLY = 8 };

static int overlaps(uintptr_t address, size_t size) {
  for (struct range *range = all_ranges; range; range = range->next)
    if (range->block->process == the_process && address < range->address + range->size &&
        range->address < address + size)
      return 1;
  return 0;
}

static int is_writable(uintptr_t address, size_t size) {
  FILE *maps = fopen("/proc/self/maps", "re");
  unsigned long begin, end;
  char access[5] = "", line[512];
  int is = 1;
  while (maps && is && fgets(line, sizeof line, maps))
    if (sscanf(line, "%lx-%lx %4s", &begin, &end, access) == 3 && begin < address + size && address < end)
      is = access[1] == 'w';
  if (maps) fclose(maps);
  return is;
}

static struct range *pin(int device, uintptr_t address, size_t size) {
  struct block *block = new_block(PINNED, device, size);
  block->address = address;
  block->view = (char *)address;
  return add_range(block, address, size);
}

EXPORT CUresult cuMemHostRegister_v2(void *memory, size_t size, unsigned flags) {
  ENTER("cuMemHostRegister");
  if (!memory || !size || flags & ~0xfu) return CUDA_ERROR_INVALID_VALUE;
  lock();
  struct context *context;
  CHECK(current_context(&context));
  CHECK(refuse_while_capturing(context));
  REFUSE_IF(overlaps((uintptr_t)memory, size), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  REFUSE_IF(!is_mapped((uintptr_t)memory, size), CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(!(flags & READ_ONLY) && !is_writable((uintptr_t)memory, size), CUDA_ERROR_INVALID_VALUE);
  pin(context->device, (uintptr_t)memory, size);
  return unlock(CUDA_SUCCESS);
}

static struct range *pinned_at(void *memory) {
  struct range *range = range_at(the_process, (uintptr_t)memory);
  return range && range->block->kind == PINNED ? range : NULL;
}

EXPORT CUresult cuMemHostUnregister(void *memory) {
  ENTER("cuMemHostUnregister");
  lock();
  struct context *context;
  CHECK(current_context(&context));
  struct range *range = pinned_at(memory);
  REFUSE_IF(!range || range->address != (uintptr_t)memory || range->is_host_allocated,
            CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  remove_range(range);
  return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuMemHostAlloc(void **memory, size_t size, unsigned flags) {
  ENTER("cuMemHostAlloc");
  if (!memory || !size || flags & ~7u) return CUDA_ERROR_INVALID_VALUE;
  lock();
  struct context *context;
  CHECK(current_context(&context));
  CHECK(refuse_while_capturing(context));
  size = (size + 4095) & ~(size_t)4095;
  *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REFUSE_IF(*memory == MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
  struct range *range = pin(context->device, (uintptr_t)*memory, size);
  range->is_host_allocated = 1;
  fill_with_rubbish(range);
  return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuMemFreeHost(void *memory) {
  ENTER("cuMemFreeHost");
  lock();
  struct context *context;
  CHECK(current_context(&context));
  wait_for_context(context);
  struct range *range = pinned_at(memory);
  REFUSE_IF(!range || range->address != (uintptr_t)memory || !range->is_host_allocated, CUDA_ERROR_INVALID_VALUE);
  size_t size = range->size;
  remove_range(range);
  munmap(memory, size);
  return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *address, void *memory, unsigned flags) {
  ENTER("cuMemHostGetDevicePointer");
  lock();
  struct context *context;
  CHECK(current_context(&context));
  REFUSE_IF(!address || flags || !pinned_at(memory), CUDA_ERROR_INVALID_VALUE);
  *address = (CUdeviceptr)memory; /* unified addresses */
  return unlock(CUDA_SUCCESS);
}
