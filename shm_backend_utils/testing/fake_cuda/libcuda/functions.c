/* The functions that cuGetProcAddress finds, by CUDA's version. It finds no others. */
#include "driver.h"

/* X(name, symbol, since): `since` is the first version of CUDA with this signature */
#define FUNCTIONS(X) \
  X(cuInit, cuInit, 2000) X(cuDriverGetVersion, cuDriverGetVersion, 2020) \
  X(cuGetErrorName, cuGetErrorName, 6000) X(cuGetErrorString, cuGetErrorString, 6000) \
  X(cuDeviceGetCount, cuDeviceGetCount, 2000) X(cuDeviceGet, cuDeviceGet, 2000) \
  X(cuDeviceGetName, cuDeviceGetName, 2000) \
  X(cuDeviceGetUuid, cuDeviceGetUuid_v2, 9020) X(cuDeviceGetUuid, cuDeviceGetUuid_v2, 11040) \
  X(cuDeviceTotalMem, cuDeviceTotalMem_v2, 3020) X(cuDeviceGetPCIBusId, cuDeviceGetPCIBusId, 4010) \
  X(cuDeviceGetAttribute, cuDeviceGetAttribute, 2000) X(cuDeviceCanAccessPeer, cuDeviceCanAccessPeer, 4000) \
  X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000) \
  X(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, 7000) \
  X(cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2, 7000) \
  X(cuDevicePrimaryCtxGetState, cuDevicePrimaryCtxGetState, 7000) \
  X(cuCtxSetCurrent, cuCtxSetCurrent, 4000) X(cuCtxGetCurrent, cuCtxGetCurrent, 4000) \
  X(cuCtxPushCurrent, cuCtxPushCurrent_v2, 4000) X(cuCtxPopCurrent, cuCtxPopCurrent_v2, 4000) \
  X(cuCtxGetDevice, cuCtxGetDevice, 2000) X(cuCtxGetDevice, cuCtxGetDevice_v2, 13000) \
  X(cuCtxSynchronize, cuCtxSynchronize, 2000) X(cuCtxSynchronize, cuCtxSynchronize_v2, 13000) \
  X(cuCtxEnablePeerAccess, cuCtxEnablePeerAccess, 4000) X(cuCtxRecordEvent, cuCtxRecordEvent, 12050) \
  X(cuMemAlloc, cuMemAlloc_v2, 3020) X(cuMemAllocManaged, cuMemAllocManaged, 6000) X(cuMemFree, cuMemFree_v2, 3020) \
  X(cuMemGetAddressRange, cuMemGetAddressRange_v2, 3020) X(cuMemGetInfo, cuMemGetInfo_v2, 3020) \
  X(cuMemAllocAsync, cuMemAllocAsync, 11020) X(cuMemFreeAsync, cuMemFreeAsync, 11020) \
  X(cuMemAddressReserve, cuMemAddressReserve, 10020) X(cuMemAddressFree, cuMemAddressFree, 10020) \
  X(cuMemCreate, cuMemCreate, 10020) X(cuMemRelease, cuMemRelease, 10020) X(cuMemMap, cuMemMap, 10020) \
  X(cuMemUnmap, cuMemUnmap, 10020) X(cuMemSetAccess, cuMemSetAccess, 10020) \
  X(cuMemGetAllocationGranularity, cuMemGetAllocationGranularity, 10020) \
  X(cuMemExportToShareableHandle, cuMemExportToShareableHandle, 10020) \
  X(cuMemImportFromShareableHandle, cuMemImportFromShareableHandle, 10020) \
  X(cuMemRetainAllocationHandle, cuMemRetainAllocationHandle, 11000) \
  X(cuMemGetAllocationPropertiesFromHandle, cuMemGetAllocationPropertiesFromHandle, 10020) \
  X(cuIpcGetMemHandle, cuIpcGetMemHandle, 4010) X(cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2, 11000) \
  X(cuIpcCloseMemHandle, cuIpcCloseMemHandle, 4010) \
  X(cuPointerGetAttribute, cuPointerGetAttribute, 4000) X(cuPointerGetAttributes, cuPointerGetAttributes, 7000) \
  X(cuMemHostRegister, cuMemHostRegister_v2, 6050) X(cuMemHostUnregister, cuMemHostUnregister, 4000) \
  X(cuMemHostAlloc, cuMemHostAlloc, 2020) X(cuMemFreeHost, cuMemFreeHost, 2000) \
  X(cuMemHostGetDevicePointer, cuMemHostGetDevicePointer_v2, 3020) \
  X(cuStreamCreate, cuStreamCreate, 2000) X(cuStreamCreateWithPriority, cuStreamCreateWithPriority, 5050) \
  X(cuStreamDestroy, cuStreamDestroy_v2, 4000) X(cuStreamSynchronize, cuStreamSynchronize, 2000) \
  X(cuStreamQuery, cuStreamQuery, 2000) X(cuStreamGetCtx, cuStreamGetCtx, 9020) \
  X(cuStreamGetCtx, cuStreamGetCtx_v2, 12050) X(cuStreamGetDevice, cuStreamGetDevice, 12080) \
  X(cuStreamGetFlags, cuStreamGetFlags, 5050) X(cuStreamWaitEvent, cuStreamWaitEvent, 3020) \
  X(cuStreamWriteValue64, cuStreamWriteValue64_v2, 11070) X(cuStreamWaitValue64, cuStreamWaitValue64_v2, 11070) \
  X(cuStreamBeginCapture, cuStreamBeginCapture_v2, 10010) X(cuStreamEndCapture, cuStreamEndCapture, 10000) \
  X(cuStreamIsCapturing, cuStreamIsCapturing, 10000) X(cuStreamGetCaptureInfo, cuStreamGetCaptureInfo_v2, 11030) \
  X(cuStreamGetCaptureInfo, cuStreamGetCaptureInfo_v3, 12030) X(cuGraphDestroy, cuGraphDestroy, 10000) \
  X(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, 10010) \
  X(cuEventCreate, cuEventCreate, 2000) X(cuEventDestroy, cuEventDestroy_v2, 4000) \
  X(cuEventRecord, cuEventRecord, 2000) X(cuEventRecordWithFlags, cuEventRecordWithFlags, 11010) \
  X(cuEventQuery, cuEventQuery, 2000) X(cuEventSynchronize, cuEventSynchronize, 2000) \
  X(cuEventElapsedTime, cuEventElapsedTime_v2, 2000) X(cuEventElapsedTime, cuEventElapsedTime_v2, 12080) \
  X(cuMemcpy, cuMemcpy, 4000) X(cuMemcpyAsync, cuMemcpyAsync, 4000) X(cuMemcpyHtoD, cuMemcpyHtoD_v2, 3020) \
  X(cuMemcpyDtoH, cuMemcpyDtoH_v2, 3020) X(cuMemcpyDtoD, cuMemcpyDtoD_v2, 3020) \
  X(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, 3020) X(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, 3020) \
  X(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2, 3020) X(cuMemcpyPeer, cuMemcpyPeer, 4000) \
  X(cuMemcpyPeerAsync, cuMemcpyPeerAsync, 4000) X(cuMemcpy2D, cuMemcpy2D_v2, 3020) \
  X(cuMemcpy2DUnaligned, cuMemcpy2DUnaligned_v2, 3020) X(cuMemcpy2DAsync, cuMemcpy2DAsync_v2, 3020) \
  X(cuMemsetD8, cuMemsetD8_v2, 3020) X(cuMemsetD32, cuMemsetD32_v2, 3020) X(cuMemsetD8Async, cuMemsetD8Async, 3020) \
  X(cuMemsetD32Async, cuMemsetD32Async, 3020) X(cuLaunchHostFunc, cuLaunchHostFunc, 10000)

typedef void (*function_pointer)(void);
#define DECLARED(name, symbol, since) extern void symbol(void);
FUNCTIONS(DECLARED)
CUresult cuGetProcAddress(const char *name, function_pointer *found, int version, uint64_t flags);
CUresult cuGetProcAddress_v2(const char *name, function_pointer *found, int version, uint64_t flags, int *status);

#define ROW(name, symbol, since) {#name, since, symbol},
static const struct { const char *name; int since; function_pointer pointer; } table[] = {
  FUNCTIONS(ROW)
  {"cuGetProcAddress", 11030, (function_pointer)cuGetProcAddress},
  {"cuGetProcAddress", 12000, (function_pointer)cuGetProcAddress_v2},
};
#define ROWS (sizeof table / sizeof *table)

int is_function(const char *name) {
  for (size_t i = 0; i < ROWS; i++) if (!strcmp(table[i].name, name)) return 1;
  return 0;
}

enum { FOUND, NOT_FOUND, TOO_NEW };

EXPORT CUresult cuGetProcAddress_v2(const char *name, function_pointer *found, int version, uint64_t flags,
                                     int *status) {
  (void)flags; /* which default stream is meant: the legacy one, here */
  if (!name || !found) return CUDA_ERROR_INVALID_VALUE;
  int best = 0;
  *found = NULL;
  for (size_t i = 0; i < ROWS; i++) {
    if (strcmp(table[i].name, name) || table[i].since > version || table[i].since > settings.driver_version) continue;
    if (table[i].since <= best) continue;
    best = table[i].since;
    *found = table[i].pointer;
  }
  if (status) *status = *found ? FOUND : is_function(name) ? TOO_NEW : NOT_FOUND;
  return *found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuGetProcAddress(const char *name, function_pointer *found, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, found, version, flags, NULL);
}
