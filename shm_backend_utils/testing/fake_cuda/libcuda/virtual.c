/* Virtual memory management: addresses are reserved, memory is created or imported, mapped there and made accessible.
 *
 * A descriptor for other processes is that of the memory's own file, whose name says the GPU. So memory outlives its
 * exporter, and any process with the descriptor may import it.
 */
#include "driver.h"
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define POSIX_FILE_DESCRIPTOR 1
#define FILE_NAME "fake-cuda-shareable-"

struct location { int type, id; };
struct properties { int type, handle_types; struct location location; void *unused; unsigned char flags[8]; };
struct access { struct location location; int flags; };
struct reservation { struct reservation *next; struct block *block; };
struct physical {
  struct physical *next;
  uint64_t handle;
  size_t size;
  int fd, device, process, references, maps, is_imported, is_filled, handle_types;
};
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

static struct physical *physical_in(int process, uint64_t handle) {
  for (struct physical *one = physicals; one; one = one->next)
    if (one->handle == handle && one->process == process) return one;
  return NULL;
}

static struct physical *physical_of(uint64_t handle) { return physical_in(the_process, handle); }

static struct physical *new_physical(size_t size, int fd, int device) {
  struct physical *physical = calloc(1, sizeof *physical);
  *physical = (struct physical){physicals, new_number(), size, fd, device, the_process, 1, 0, 0, 0, 0};
  return physicals = physical;
}

static void name_of_file(int device, char *name, size_t size) {
  int length = snprintf(name, size, FILE_NAME);
  for (int i = 0; i < 16; i++)
    length += snprintf(name + length, size - (size_t)length, "%02x", settings.uuids[device][i]);
}

size_t created_bytes(int device) {
  size_t bytes = 0;
  for (struct physical *one = physicals; one; one = one->next)
    if (one->device == device && !one->is_imported) bytes += one->size;
  return bytes;
}

int is_imported(struct range *range) {
  return range->block->kind == VIRTUAL && physical_in(range->block->process, range->physical)->is_imported;
}

int live_virtual(int process) { /* handles that were not released, and reservations in which nothing is mapped */
  int count = 0;
  for (struct physical *one = physicals; one; one = one->next)
    count += (process < 0 || one->process == process) ? one->references : 0;
  for (struct reservation *one = reservations; one; one = one->next)
    count += (process < 0 || one->block->process == process) && !one->block->ranges;
  return count;
}

static void free_physical(struct physical *physical) {
  if (physical->references || physical->maps) return;
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
  if (settings.has_no_virtual_memory) return CUDA_ERROR_NOT_SUPPORTED;
  if (properties->handle_types & ~POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  if (properties->handle_types && settings.has_no_descriptors) return CUDA_ERROR_NOT_SUPPORTED;
  lock();
  REFUSE_IF(size > settings.memory_bytes - bytes_in_use(device), CUDA_ERROR_OUT_OF_MEMORY);
  char name[64];
  name_of_file(device, name, sizeof name);
  int fd = memfd_create(name, MFD_CLOEXEC);
  if (fd >= 0 && ftruncate(fd, (off_t)size)) close(fd), fd = -1;
  REFUSE_IF(fd < 0, CUDA_ERROR_OUT_OF_MEMORY);
  struct physical *physical = new_physical(size, fd, device);
  physical->handle_types = properties->handle_types;
  *handle = physical->handle;
  return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuMemRelease(uint64_t handle) {
  ENTER("cuMemRelease");
  lock();
  struct physical *physical = physical_of(handle);
  REFUSE_IF(!physical || !physical->references, CUDA_ERROR_INVALID_VALUE);
  physical->references--;
  free_physical(physical);
  return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuMemExportToShareableHandle(void *exported, uint64_t handle, int type, uint64_t flags) {
  ENTER("cuMemExportToShareableHandle");
  lock();
  struct physical *physical = physical_of(handle);
  REFUSE_IF(!exported || !physical || flags, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(type != POSIX_FILE_DESCRIPTOR || !(physical->handle_types & type), CUDA_ERROR_NOT_PERMITTED);
  int fd = fcntl(physical->fd, F_DUPFD_CLOEXEC, 0);
  REFUSE_IF(fd < 0, CUDA_ERROR_OPERATING_SYSTEM);
  *(int *)exported = fd;
  return unlock(CUDA_SUCCESS);
}

/* Returns the device whose UUID a descriptor's file has in its name; -1 if the file is none of this driver's. */
static int device_in(int fd) {
  char path[64], found[128], expected[128] = "/memfd:";
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(path, found, sizeof found - 1);
  found[length > 0 ? length : 0] = 0;
  for (int device = 0; device < settings.devices; device++) {
    name_of_file(device, expected + 7, sizeof expected - 7);
    strcat(expected, " (deleted)");
    if (!strcmp(found, expected)) return device;
  }
  return -1;
}

EXPORT CUresult cuMemImportFromShareableHandle(uint64_t *handle, void *imported, int type) {
  ENTER("cuMemImportFromShareableHandle");
  if (!handle || type != POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
  lock();
  struct stat status;
  int device = device_in((int)(intptr_t)imported), fd = -1;
  if (device >= 0 && !fstat((int)(intptr_t)imported, &status)) fd = fcntl((int)(intptr_t)imported, F_DUPFD_CLOEXEC, 0);
  REFUSE_IF(fd < 0, CUDA_ERROR_UNKNOWN); /* also for a GPU that this process does not see */
  struct physical *physical = new_physical((size_t)status.st_size, fd, device);
  physical->is_imported = physical->is_filled = 1;
  physical->handle_types = POSIX_FILE_DESCRIPTOR;
  *handle = physical->handle;
  return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuMemRetainAllocationHandle(uint64_t *handle, void *address) {
  ENTER("cuMemRetainAllocationHandle");
  lock();
  struct range *range = range_at(the_process, (uintptr_t)address);
  REFUSE_IF(!handle || !range || range->block->kind != VIRTUAL, CUDA_ERROR_INVALID_VALUE);
  physical_of(range->physical)->references++;
  *handle = range->physical;
  return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(struct properties *properties, uint64_t handle) {
  ENTER("cuMemGetAllocationPropertiesFromHandle");
  lock();
  struct physical *physical = physical_of(handle);
  REFUSE_IF(!properties || !physical, CUDA_ERROR_INVALID_VALUE);
  *properties = (struct properties){1, physical->handle_types, {1, physical->device}, NULL, {0}};
  return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
  ENTER("cuMemMap");
  lock();
  struct block *block = reserved_at(address, size);
  struct physical *physical = physical_of(handle);
  REFUSE_IF(!block || !physical || !physical->references || flags, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(!size || size % BLOCK_BYTES || offset % BLOCK_BYTES, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(offset || size != physical->size, CUDA_ERROR_NOT_SUPPORTED); /* a part, as on GPUs that cannot */
  for (size_t at = 0; at < size; at += BLOCK_BYTES)
    REFUSE_IF(range_at(the_process, address + at), CUDA_ERROR_INVALID_VALUE);
  char *view = block->view + (address - block->address);
  REFUSE_IF(mmap(view, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, physical->fd, (off_t)offset) == MAP_FAILED,
            CUDA_ERROR_OUT_OF_MEMORY);
  struct range *range = add_range(block, address, size);
  range->is_accessible = 0;
  range->physical = handle;
  block->device = physical->device;
  range->waits = context_of(the_process, physical->device)->waits;
  physical->maps++;
  if (!physical->is_filled) fill_with_rubbish(range);
  physical->is_filled = 1;
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
    struct context *context = context_of(the_process, block->device);
    if (!forgives(WAITS) && range->is_accessible && range->waits == context->waits && is_at_work(context))
      violation("memory was unmapped while its device was at work, and nobody had waited for the device");
    remove_range(range); /* the reservation's block stays */
    mmap(block->view + (address - block->address), mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    physical->maps--;
    free_physical(physical);
    address += mapped;
    size -= mapped;
  }
  return unlock(CUDA_SUCCESS);
}
