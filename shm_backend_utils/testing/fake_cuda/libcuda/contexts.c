/* Devices and their primary contexts; which context is current in a thread. */
#include "driver.h"
#include <stdio.h>
#include <stdint.h>

#define DEEPEST 16
static struct context contexts[PROCESSES][DEVICES];
static __thread struct context *stacks[PROCESSES][DEEPEST];
static __thread int depths[PROCESSES];

struct context *context_of(int process, CUdevice device) { return &contexts[process][device]; }

CUresult known_context(CUcontext context) {
  if (context < &contexts[0][0] || context > &contexts[PROCESSES - 1][DEVICES - 1] || !context->retained ||
      context->process != the_process)
    return CUDA_ERROR_INVALID_CONTEXT;
  return context->error;
}

static struct context *top(void) {
  return depths[the_process] ? stacks[the_process][depths[the_process] - 1] : NULL;
}

CUresult current_context(struct context **context) {
  *context = top();
  if (!*context) return CUDA_ERROR_INVALID_CONTEXT;
  return (*context)->retained ? (*context)->error : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

size_t bytes_of_contexts(CUdevice device) {
  size_t count = 0;
  for (int process = 0; process < PROCESSES; process++) count += contexts[process][device].retained > 0;
  return forgives(CONTEXTS) ? 0 : count * settings.context_bytes;
}

EXPORT int fake_cuda_depth(int process) {
  int depth = 0;
  for (int i = 0; i < PROCESSES; i++) if (process < 0 || process == i) depth += depths[i];
  return depth;
}

void end_contexts(int process) {
  for (int device = 0; device < DEVICES; device++) contexts[process][device] = (struct context){.process = process};
}

enum { VIRTUAL_MEMORY = 102, DESCRIPTORS = 103 };

static int is_device(CUdevice device) { return device >= 0 && device < settings.devices; }

EXPORT CUresult cuInit(unsigned flags) {
  ENTER("cuInit");
  return flags ? CUDA_ERROR_INVALID_VALUE : initialize();
}

EXPORT CUresult cuDriverGetVersion(int *version) {
  ENTER("cuDriverGetVersion");
  *version = settings.driver_version;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *count) {
  ENTER("cuDeviceGetCount");
  *count = settings.devices;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  ENTER("cuDeviceGet");
  if (!is_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
  ENTER("cuDeviceGetName");
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  snprintf(name, (size_t)size, "fake CUDA driver, no GPU");
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid_v2(unsigned char *uuid, CUdevice device) {
  ENTER("cuDeviceGetUuid");
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  memcpy(uuid, settings.uuids[device], 16);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *size, CUdevice device) {
  ENTER("cuDeviceTotalMem");
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  *size = settings.memory_bytes;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetPCIBusId(char *id, int size, CUdevice device) {
  ENTER("cuDeviceGetPCIBusId");
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  snprintf(id, (size_t)size, "0000:%02X:00.0", 0xFA + device % 6);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
  ENTER("cuDeviceGetAttribute");
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  if (attribute <= 0 || attribute > 200) return CUDA_ERROR_INVALID_VALUE;
  if (attribute == VIRTUAL_MEMORY) return *value = !settings.has_no_virtual_memory, CUDA_SUCCESS;
  if (attribute == DESCRIPTORS) return *value = !settings.has_no_descriptors, CUDA_SUCCESS;
  /* unified addressing, managed memory, concurrent managed access, pools, stream memory operations */
  static const int present[] = {41, 83, 89, 115, 122};
  *value = attribute == 10; /* warp size: nobody divides by it */
  if (attribute == 11) *value = (int)settings.max_pitch;
  for (size_t i = 0; i < sizeof present / sizeof *present; i++) *value |= attribute == present[i];
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
  ENTER("cuDeviceCanAccessPeer");
  if (!is_device(device) || !is_device(peer)) return CUDA_ERROR_INVALID_DEVICE;
  *can = device != peer;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  ENTER("cuDevicePrimaryCtxRetain");
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  lock();
  struct context *primary = context_of(the_process, device);
  size_t needed = primary->retained || forgives(CONTEXTS) ? 0 : settings.context_bytes;
  REFUSE_IF(bytes_in_use(device) + needed > settings.memory_bytes, CUDA_ERROR_OUT_OF_MEMORY);
  primary->process = the_process;
  primary->device = device;
  primary->retained++;
  *context = primary;
  return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  ENTER("cuDevicePrimaryCtxRelease");
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  lock();
  struct context *primary = context_of(the_process, device);
  REFUSE_IF(!primary->retained, CUDA_ERROR_INVALID_CONTEXT);
  primary->retained--;
  return unlock(CUDA_SUCCESS);
}

/* Only clears a sticky error: memory stays. */
EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
  ENTER("cuDevicePrimaryCtxReset");
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  lock();
  context_of(the_process, device)->error = CUDA_SUCCESS;
  return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) {
  ENTER("cuDevicePrimaryCtxGetState");
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  lock();
  *flags = 0;
  *is_active = context_of(the_process, device)->retained > 0;
  return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
  ENTER("cuCtxSetCurrent");
  lock();
  if (!context) {
    if (depths[the_process]) depths[the_process]--;
    return unlock(CUDA_SUCCESS);
  }
  REFUSE_IF(known_context(context) == CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_CONTEXT);
  if (!depths[the_process]) depths[the_process] = 1;
  stacks[the_process][depths[the_process] - 1] = context;
  return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
  ENTER("cuCtxGetCurrent");
  *context = top();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) {
  ENTER("cuCtxPushCurrent");
  lock();
  REFUSE_IF(known_context(context) == CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_CONTEXT);
  REFUSE_IF(depths[the_process] == DEEPEST, CUDA_ERROR_INVALID_VALUE);
  stacks[the_process][depths[the_process]++] = context;
  return unlock(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context) {
  ENTER("cuCtxPopCurrent");
  if (!depths[the_process]) return CUDA_ERROR_INVALID_CONTEXT;
  struct context *popped = stacks[the_process][--depths[the_process]];
  if (context) *context = popped;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
  ENTER("cuCtxGetDevice");
  if (!top()) return CUDA_ERROR_INVALID_CONTEXT;
  *device = top()->device;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice_v2(CUdevice *device, CUcontext context) { /* from 13.0 */
  ENTER("cuCtxGetDevice");
  struct context *meant = context ? context : top();
  if (!meant) return CUDA_ERROR_INVALID_CONTEXT;
  *device = meant->device;
  return CUDA_SUCCESS;
}

static CUresult synchronize(struct context *context) {
  CHECK(end_captures(context));
  wait_for_context(context);
  return unlock(context->error);
}

EXPORT CUresult cuCtxSynchronize(void) {
  ENTER("cuCtxSynchronize");
  lock();
  struct context *context;
  CHECK(current_context(&context));
  return synchronize(context);
}

EXPORT CUresult cuCtxSynchronize_v2(CUcontext named) { /* from 13.0 */
  ENTER("cuCtxSynchronize");
  lock();
  struct context *context = named;
  CHECK(named ? known_context(named) : current_context(&context));
  return synchronize(context);
}

EXPORT CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
  ENTER("cuCtxEnablePeerAccess");
  lock();
  struct context *context;
  CHECK(current_context(&context));
  CHECK(known_context(peer));
  REFUSE_IF(flags || peer == context, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(context->peers & 1u << peer->device, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
  context->peers |= 1u << peer->device;
  return unlock(CUDA_SUCCESS);
}
