/* Calls for tests: the bytes behind an address, unreleased objects, the end of a virtual process. */
#include "driver.h"

/* Returns where host code finds the bytes of an address; NULL if fewer bytes are there. */
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
    counts[0] += block->kind != OPENED && block->kind != PINNED && !is_imported(range);
    counts[1] += is_imported(range);
    counts[4] += block->kind == PINNED;
    for (struct opening *one = block->openings; one; one = one->next) counts[1] += one->count;
  }
  counts[0] += live_virtual(process);
  counts[2] = live_events(process);
  counts[3] = live_streams(process);
  unlock(0);
}
