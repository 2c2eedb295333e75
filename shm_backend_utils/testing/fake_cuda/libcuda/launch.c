/* Host functions on streams, which stand in for kernels here. They must not call CUDA. */
#include "driver.h"

struct call_work { struct work work; void (*function)(void *); void *argument; };

static CUresult call_now(struct work *work, struct stream *stream) {
  (void)stream;
  struct call_work *call = (struct call_work *)work;
  is_in_host_function = 1;
  call->function(call->argument);
  is_in_host_function = 0;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuLaunchHostFunc(CUstream handle, void (*function)(void *), void *argument) {
  ENTER("cuLaunchHostFunc");
  if (!function) return CUDA_ERROR_INVALID_VALUE;
  lock();
  struct stream *stream;
  CHECK(find_stream(handle, &stream));
  struct call_work *call = calloc(1, sizeof *call);
  *call = (struct call_work){.function = function, .argument = argument};
  call->work.is_late = 1;
  call->work.run = call_now;
  return unlock(put_work(stream, &call->work));
}
