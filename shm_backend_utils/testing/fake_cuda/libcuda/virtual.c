/* Virtual memory management: addresses are reserved, memory is created, mapped there and made accessible. */
#include "driver.h"
#include <sys/mman.h>
#include <unistd.h>

struct location { int type, id; };
struct properties { int type, handle_types; struct location location; void *unused; unsigned char flags[8]; };
struct access { struct location location; int flags; };
struct reservation { struct reservation *next; struct block *block; };
struct physical { struct physical *next; uint64_t handle; size_t size; int fd, device, process, is_released, maps; };
static struct reservation *reservations;
static struct physical *physicals;

static struct block *reserved_at(uintptr_t address, size_t size) {
  for (struct reservation *one = reservations; one; one = one->next) {
    struct block *block = one->block;
    if (block->process == the_process && address >= block->address && address - block->address < block->size &&
        size <= block->size - (address - block->address))
      return block;
  }
  return NULL;
}

static struct physical *physical_of(uint64_t handle) {
  for (struct physical *one = physicals; one; one = one->next)
    if (one->handle == handle && one->process == the_process) return one;
  return NULL;
}

static void free_physical(struct physical *physical) {
  if (!physical->is_released || physical->maps) return;
  struct physical **at = &physicals;
  while (*at != physical) at = &(*at)->next;
  *at = physical->next;
  close(physical->fd);
  free(physical);
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *size, const struct properties *properties, int option) {
  ENTER("cuMemGetAllocationGranularity");
  if (!size || !properties || option < 0 || option > 1) return CUDA_ERROR_INVALID_VALUE;
  *size = BLOCK_BYTES;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wish,
                                     uint64_t flags) {
  ENTER("cuMemAddressReserve");
  (void)wish; /* a hint */
  if (!address || !size || size % BLOCK_BYTES || alignment > BLOCK_BYTES || flags) return CUDA_ERROR_INVALID_VALUE;
  lock();
  struct block *block = new_block(VIRTUAL, 0, size);
  block->address = reserve(size);
  block->view = (char *)reserve(size);
  struct reservation *reservation = calloc(1, sizeof *reservation);
  *reservation = (struct reservation){reservations, block};
  reservations = reservation;
  *address = block->address;
  return unlock(block->address && block->view ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  ENTER("cuMemAddressFree");
  lock();
  struct reservation **at = &reservations;
  while (*at && ((*at)->block->address != address || (*at)->block->process != the_process)) at = &(*at)->next;
  struct reservation *one = *at;
  REFUSE_IF(!one || one->block->size != size || one->block->ranges, CUDA_ERROR_INVALID_VALUE);
  *at = one->next;
  munmap((void *)address, size);
  munmap(one->block->view, size);
  free(one->block);
  free(one);
  return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuMemCreate(uint64_t *handle, size_t size, const struct properties *properties, uint64_t flags) {
  ENTER("cuMemCreate");
  if (!handle || !size || size % BLOCK_BYTES || !properties || flags) return CUDA_ERROR_INVALID_VALUE;
  int device = properties->location.id; /* types below: 1 is pinned memory, and 1 a device */
  if (properties->type != 1 || properties->location.type != 1) return CUDA_ERROR_INVALID_VALUE;
  if (device < 0 || device >= settings.devices) return CUDA_ERROR_INVALID_DEVICE;
  lock();
  REFUSE_IF(size > settings.memory_bytes - bytes_in_use(device), CUDA_ERROR_OUT_OF_MEMORY);
  int fd = new_file(new_nonce(), size);
  REFUSE_IF(fd < 0, CUDA_ERROR_OUT_OF_MEMORY);
  struct physical *physical = calloc(1, sizeof *physical);
  *physical = (struct physical){physicals, new_number(), size, fd, device, the_process, 0, 0};
  physicals = physical;
  *handle = physical->handle;
  return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuMemRelease(uint64_t handle) {
  ENTER("cuMemRelease");
  lock();
  struct physical *physical = physical_of(handle);
  REFUSE_IF(!physical || physical->is_released, CUDA_ERROR_INVALID_VALUE);
  physical->is_released = 1;
  free_physical(physical);
  return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
  ENTER("cuMemMap");
  lock();
  struct block *block = reserved_at(address, size);
  struct physical *physical = physical_of(handle);
  REFUSE_IF(!block || !physical || physical->is_released || flags, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(!size || size % BLOCK_BYTES || offset % BLOCK_BYTES, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(offset > physical->size || size > physical->size - offset, CUDA_ERROR_INVALID_VALUE);
  for (size_t at = 0; at < size; at += BLOCK_BYTES)
    REFUSE_IF(range_at(the_process, address + at), CUDA_ERROR_INVALID_VALUE);
  char *view = block->view + (address - block->address);
  REFUSE_IF(mmap(view, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, physical->fd, (off_t)offset) == MAP_FAILED,
            CUDA_ERROR_OUT_OF_MEMORY);
  struct range *range = add_range(block, address, size);
  range->is_accessible = 0;
  range->physical = handle;
  block->device = physical->device;
  physical->maps++;
  fill_with_rubbish(range);
  return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const struct access *access, size_t count) {
  ENTER("cuMemSetAccess");
  lock();
  REFUSE_IF(!access || !count || !reserved_at(address, size), CUDA_ERROR_INVALID_VALUE);
  for (uintptr_t at = address; at < address + size;) {
    struct range *range = range_at(the_process, at);
    REFUSE_IF(!range, CUDA_ERROR_INVALID_VALUE);
    range->is_accessible = access->flags != 0;
    at = range->address + range->size;
  }
  return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  ENTER("cuMemUnmap");
  lock();
  REFUSE_IF(!reserved_at(address, size), CUDA_ERROR_INVALID_VALUE);
  while (size) {
    struct range *range = range_at(the_process, address);
    REFUSE_IF(!range || range->address != address || range->size > size, CUDA_ERROR_INVALID_VALUE);
    struct block *block = range->block;
    struct physical *physical = physical_of(range->physical);
    size_t mapped = range->size;
    remove_range(range); /* the reservation's block stays */
    mmap(block->view + (address - block->address), mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    physical->maps--;
    free_physical(physical);
    address += mapped;
    size -= mapped;
  }
  return unlock(CUDA_SUCCESS);
}
