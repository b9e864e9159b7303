/* The driver behind us, and who stands in front of it. */
#ifndef KYBERNATE_PRELOAD_DRIVER_H
#define KYBERNATE_PRELOAD_DRIVER_H

#include <stdbool.h>

#include "abi.h"

/* Every call that we make: its name in the library, our name for it, its arguments. */
#define CALLS(C)                                                                                                       \
    C(cuInit, init, (unsigned int))                                                                                    \
    C(cuMemAlloc_v2, alloc, (CUdeviceptr *, size_t))                                                                   \
    C(cuMemFree_v2, free, (CUdeviceptr))                                                                               \
    C(cuMemCreate, create, (CUhandle *, size_t, const CUmemAllocationProp *, unsigned long long))                      \
    C(cuMemRelease, release, (CUhandle))                                                                               \
    C(cuMemMap, map, (CUdeviceptr, size_t, size_t, CUhandle, unsigned long long))                                      \
    C(cuMemUnmap, unmap, (CUdeviceptr, size_t))                                                                        \
    C(cuMemSetAccess, set_access, (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t))                              \
    C(cuMemAddressReserve, reserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long))                  \
    C(cuMemAddressFree, unreserve, (CUdeviceptr, size_t))                                                              \
    C(cuMemExportToShareableHandle, share, (void *, CUhandle, int, unsigned long long))                                \
    C(cuMemImportFromShareableHandle, import, (CUhandle *, void *, int))                                               \
    C(cuMemRetainAllocationHandle, retain, (CUhandle *, void *))                                                       \
    C(cuMemGetAllocationPropertiesFromHandle, properties, (CUmemAllocationProp *, CUhandle))                           \
    C(cuMemGetAllocationGranularity, granularity, (size_t *, const CUmemAllocationProp *, int))                        \
    C(cuDeviceGetAttribute, attribute, (int *, int, CUdevice))                                                         \
    C(cuCtxGetCurrent, context, (CUcontext *))                                                                         \
    C(cuCtxGetDevice, device, (CUdevice *))                                                                            \
    C(cuCtxPushCurrent_v2, push, (CUcontext))                                                                          \
    C(cuCtxPopCurrent_v2, pop, (CUcontext *))                                                                          \
    C(cuCtxSynchronize, synchronize, (void))                                                                           \
    C(cuCtxDestroy_v2, destroy, (CUcontext))                                                                           \
    C(cuCtxEnablePeerAccess, enable_peer, (CUcontext, unsigned int))                                                   \
    C(cuDevicePrimaryCtxRetain, primary_retain, (CUcontext *, CUdevice))                                               \
    C(cuDevicePrimaryCtxRelease_v2, primary_release, (CUdevice))                                                       \
    C(cuDevicePrimaryCtxReset_v2, primary_reset, (CUdevice))                                                           \
    C(cuDevicePrimaryCtxGetState, primary_state, (CUdevice, unsigned int *, int *))                                    \
    C(cuIpcGetMemHandle, ipc_handle, (void *, CUdeviceptr))                                                            \
    C(cuIpcOpenMemHandle_v2, ipc_open, (void))                                                                         \
    C(cuIpcCloseMemHandle, ipc_close, (CUdeviceptr))                                                                   \
    C(cuMulticastBindMem, multicast, (CUhandle, size_t, CUhandle, size_t, size_t, unsigned long long))                 \
    C(cuMemAllocPitch_v2, pitch, (CUdeviceptr *, size_t *, size_t, size_t, unsigned int))                              \
    C(cuMemAllocManaged, managed, (CUdeviceptr *, size_t, unsigned int))                                               \
    C(cuMemAllocAsync, async, (CUdeviceptr *, size_t, CUstream))                                                       \
    C(cuMemAllocAsync_ptsz, async_ptsz, (CUdeviceptr *, size_t, CUstream))                                             \
    C(cuMemAllocFromPoolAsync, pool, (CUdeviceptr *, size_t, CUmemoryPool, CUstream))                                  \
    C(cuMemAllocFromPoolAsync_ptsz, pool_ptsz, (CUdeviceptr *, size_t, CUmemoryPool, CUstream))                        \
    C(cuMemFreeAsync, free_async, (CUdeviceptr, CUstream))                                                             \
    C(cuMemFreeAsync_ptsz, free_async_ptsz, (CUdeviceptr, CUstream))                                                   \
    C(cuArrayCreate_v2, array, (CUarray *, const CUDA_ARRAY_DESCRIPTOR *))                                             \
    C(cuArray3DCreate_v2, array_3d, (CUarray *, const CUDA_ARRAY3D_DESCRIPTOR *))                                      \
    C(cuArrayDestroy, array_end, (CUarray))                                                                            \
    C(cuMipmappedArrayCreate, mipmap, (CUarray *, const CUDA_ARRAY3D_DESCRIPTOR *, unsigned int))                      \
    C(cuMipmappedArrayDestroy, mipmap_end, (CUarray))                                                                  \
    C(cuMemGetInfo_v2, info, (size_t *, size_t *))                                                                     \
    C(cuDeviceTotalMem_v2, total, (size_t *, CUdevice))                                                                \
    C(cuDeviceGetUuid, uuid, (void *, CUdevice))                                                                       \
    C(cuGetProcAddress, proc, (const char *, void **, int, uint64_t))                                                  \
    C(cuGetProcAddress_v2, proc_status, (const char *, void **, int, uint64_t, int *))

struct driver {
#define MEMBER(symbol, name, types) CUresult(*name) types;
    CALLS(MEMBER)
#undef MEMBER
    bool complete; /* has all that taking memory over needs */
};

/* The driver's own functions; a member is NULL where this driver has none. Never NULL itself. */
const struct driver *driver(void);

#endif
