/* Stream memory operations: streams write 64-bit words and wait for them, in registered memory or on a device. */
#include "driver.h"
#include <unistd.h>

struct word_work { struct work work; uintptr_t address; uint64_t value; };

/* Finds a word that streams of a process may use; it is held until release_place. */
static CUresult find_word(int process, uintptr_t address, struct place *place) {
  struct range *range = range_at(process, address);
  if (!range || address % sizeof(uint64_t) || range->address + range->size - address < sizeof(uint64_t))
    return CUDA_ERROR_INVALID_VALUE;
  return resolve(process, address, sizeof(uint64_t), place);
}

static CUresult find_word_later(struct word_work *one, struct stream *stream, struct place *place) {
  CUresult result = find_word(stream->process, one->address, place);
  if (!result) return CUDA_SUCCESS;
  violation("a stream used a word in memory that is not registered any more");
  return CUDA_ERROR_ILLEGAL_ADDRESS;
}

static CUresult write_now(struct work *work, struct stream *stream) {
  struct word_work *one = (struct word_work *)work;
  struct place place = {NULL, NULL};
  lock();
  REFUSE_IF(stream->context->error, CUDA_SUCCESS); /* after an error, nothing is written */
  CHECK(find_word_later(one, stream, &place));
  __atomic_store_n((uint64_t *)place.bytes, one->value, __ATOMIC_RELEASE);
  release_place(&place);
  return unlock(CUDA_SUCCESS);
}

static CUresult wait_now(struct work *work, struct stream *stream) { /* others write the word, who cannot signal this */
  struct word_work *one = (struct word_work *)work;
  for (;; usleep(50)) {
    struct place place = {NULL, NULL};
    lock();
    REFUSE_IF(stream->is_ended || stream->context->error, CUDA_SUCCESS);
    CHECK(find_word_later(one, stream, &place));
    uint64_t found = __atomic_load_n((uint64_t *)place.bytes, __ATOMIC_ACQUIRE);
    release_place(&place);
    unlock(0);
    if ((int64_t)(found - one->value) >= 0) return CUDA_SUCCESS; /* a cyclic comparison */
  }
}

static CUresult put_word(CUstream on, uintptr_t address, uint64_t value, unsigned flags,
                         CUresult (*run)(struct work *work, struct stream *stream)) {
  lock();
  struct stream *stream;
  struct place place = {NULL, NULL};
  CHECK(find_stream(on, &stream));
  REFUSE_IF(flags, CUDA_ERROR_NOT_SUPPORTED);
  CHECK(find_word(the_process, address, &place));
  release_place(&place);
  struct word_work *one = calloc(1, sizeof *one);
  *one = (struct word_work){.work.run = run, .address = address, .value = value};
  return unlock(put_work(stream, &one->work));
}

EXPORT CUresult cuStreamWriteValue64_v2(CUstream stream, uintptr_t address, uint64_t value, unsigned flags) {
  ENTER("cuStreamWriteValue64");
  return put_word(stream, address, value, flags, write_now);
}

EXPORT CUresult cuStreamWaitValue64_v2(CUstream stream, uintptr_t address, uint64_t value, unsigned flags) {
  ENTER("cuStreamWaitValue64"); /* without flags: until the word is greater or equal */
  return put_word(stream, address, value, flags, wait_now);
}
