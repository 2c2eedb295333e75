/* What addresses mean: blocks, which are mapped as one, and the ranges that lie in them. */
#include "driver.h"
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#define RUBBISH 0xa5

struct range *all_ranges;

uintptr_t reserve(size_t size) {
  size_t whole = size + BLOCK_BYTES;
  char *from = mmap(NULL, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (from == MAP_FAILED) return 0;
  uintptr_t start = ((uintptr_t)from + BLOCK_BYTES - 1) & ~(BLOCK_BYTES - 1);
  size_t before = start - (uintptr_t)from, after = BLOCK_BYTES - before;
  if (before) munmap(from, before);
  if (after) munmap((void *)(start + size), after);
  return start;
}

struct range *range_at(int process, uintptr_t address) {
  for (struct range *range = all_ranges; range; range = range->next)
    if (range->block->process == process && address >= range->address && address - range->address < range->size)
      return range;
  return NULL;
}

struct block *new_block(enum block_kind kind, int device, size_t size) {
  struct block *block = calloc(1, sizeof *block);
  block->kind = kind;
  block->process = the_process;
  block->device = device;
  block->size = size;
  block->fd = -1;
  return block;
}

struct range *add_range(struct block *block, uintptr_t address, size_t size) {
  struct range *range = calloc(1, sizeof *range);
  range->block = block;
  range->address = address;
  range->size = size;
  range->id = new_number();
  range->is_accessible = 1;
  range->next = all_ranges;
  block->ranges++;
  return all_ranges = range;
}

static void unmap(struct block *block) {
  if (block->kind == PINNED) return;
  if (block->view) munmap(block->view, block->size + (block->control ? CONTROL_BYTES : 0));
  if (block->address != (uintptr_t)block->view) munmap((void *)block->address, block->size);
  if (block->fd >= 0) close(block->fd);
}

void remove_range(struct range *range) {
  struct range **at = &all_ranges;
  while (*at != range) at = &(*at)->next;
  *at = range->next;
  struct block *block = range->block;
  while (block->uses) pthread_cond_wait(&progress, &the_lock); /* a copy that is running right now */
  int is_last = --block->ranges == 0;
  if (is_last && block->kind != VIRTUAL) {
    unmap(block);
    free(block);
  } else if (range->address + range->size == block->address + block->next_offset) {
    block->next_offset -= range->size; /* the latest small allocation of a block: its room is used again */
  }
  free(range);
}

size_t bytes_in_use(int device) {
  size_t used = created_bytes(device) + bytes_of_contexts(device);
  for (struct range *range = all_ranges; range; range = range->next) {
    struct block *block = range->block;
    if (block->device != device || block->kind == PINNED || block->kind == OPENED || block->kind == VIRTUAL) continue;
    if (block->kind != OWN || range->address == block->address) used += block->kind == OWN ? block->size : range->size;
  }
  return used;
}

/* New memory is not zero, so that reads of unwritten memory show. In large memory, only a page in each 256 KiB and the
 * end are filled, which is enough and quick. */
void fill_with_rubbish(struct range *range) {
  char *bytes = range->block->view + (range->address - range->block->address);
  size_t step = range->size <= MOST_RUBBISH ? range->size : (size_t)256 << 10;
  for (size_t at = 0; at < range->size; at += step)
    memset(bytes + at, RUBBISH, step == range->size ? step : range->size - at < 4096 ? range->size - at : 4096);
  if (step < range->size) memset(bytes + range->size - 4096, RUBBISH, 4096);
}

int is_mapped(uintptr_t address, size_t size) {
  uintptr_t page = address & ~(uintptr_t)4095;
  return !msync((void *)page, address + size - page, MS_ASYNC) || errno != ENOMEM;
}

void end_ranges(int process) { /* others keep what they opened until they close it */
  for (struct range *range = all_ranges; range;) {
    struct block *block = range->block;
    if (block->process != process || block->kind == VIRTUAL || block->kind == PINNED) {
      range = range->next;
      continue;
    }
    while (block->openings) {
      struct opening *opening = block->openings;
      block->openings = opening->next;
      __atomic_store_n(&opening->opener->who, 0, __ATOMIC_RELEASE);
      free(opening);
    }
    remove_range(range);
    range = all_ranges; /* it may have released the lock */
  }
}

static int is_gone(struct block *block) { /* its owner has freed all that was opened here */
  if (block->kind != OPENED) return 0;
  for (struct opening *one = block->openings; one; one = one->next)
    if (!__atomic_load_n(&one->export->is_freed, __ATOMIC_ACQUIRE)) return 0;
  return 1;
}

static uintptr_t end_of_accessible(struct range *range, uintptr_t end) { /* VIRTUAL: over neighbouring mappings */
  uintptr_t reached = range->address + range->size;
  while (range && range->is_accessible && reached < end && range->block->kind == VIRTUAL) {
    struct block *block = range->block;
    range = range_at(block->process, reached);
    if (!range || range->block != block || !range->is_accessible) break;
    reached = range->address + range->size;
  }
  return reached;
}

CUresult resolve(int process, uintptr_t address, size_t span, struct place *place) {
  *place = (struct place){NULL, (char *)address};
  if (!span) return CUDA_SUCCESS;
  struct range *range = range_at(process, address);
  if (!range) {
    for (int other = 0; other < PROCESSES; other++)
      if (range_at(other, address) && range_at(other, address)->block->kind != PINNED)
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    return is_mapped(address, span) ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
  }
  uintptr_t end = address + span;
  if (range->block->kind != PINNED && (!range->is_accessible || end_of_accessible(range, end) < end))
    return CUDA_ERROR_ILLEGAL_ADDRESS;
  if (is_gone(range->block)) {
    violation("memory was used that its owner has freed");
    return CUDA_ERROR_ILLEGAL_ADDRESS;
  }
  place->block = range->block;
  place->block->uses++;
  place->bytes = range->block->view + (address - range->block->address);
  return CUDA_SUCCESS;
}

void release_place(struct place *place) {
  if (!place->block) return;
  place->block->uses--;
  pthread_cond_broadcast(&progress);
}
