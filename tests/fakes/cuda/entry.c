/* Where callers find the driver's functions. A test double: see abi.h. */
#include <string.h>

#include "abi.h"
#include "switches.h"

/* Callers reach the functions through cuGetProcAddress, by a name and the API version that they were built for. */
#define FUNCTIONS(F)                                                                                                   \
    F("cuInit", 2000, cuInit)                                                                                          \
    F("cuDriverGetVersion", 2020, cuDriverGetVersion)                                                                  \
    F("cuGetErrorName", 6000, cuGetErrorName)                                                                          \
    F("cuGetErrorString", 6000, cuGetErrorString)                                                                      \
    F("cuDeviceGet", 2000, cuDeviceGet)                                                                                \
    F("cuDeviceGetCount", 2000, cuDeviceGetCount)                                                                      \
    F("cuDeviceGetName", 2000, cuDeviceGetName)                                                                        \
    F("cuDeviceGetPCIBusId", 4010, cuDeviceGetPCIBusId)                                                                \
    F("cuDeviceGetUuid", 9020, cuDeviceGetUuid)                                                                        \
    F("cuDeviceGetUuid", 11040, cuDeviceGetUuid_v2)                                                                    \
    F("cuDeviceTotalMem", 3020, cuDeviceTotalMem_v2)                                                                   \
    F("cuDevicePrimaryCtxRetain", 7000, cuDevicePrimaryCtxRetain)                                                      \
    F("cuDevicePrimaryCtxRelease", 11000, cuDevicePrimaryCtxRelease_v2)                                                \
    F("cuCtxCreate", 3020, cuCtxCreate_v2)                                                                             \
    F("cuCtxCreate", 12050, cuCtxCreate_v4)                                                                            \
    F("cuCtxDestroy", 4000, cuCtxDestroy_v2)                                                                           \
    F("cuCtxPushCurrent", 4000, cuCtxPushCurrent_v2)                                                                   \
    F("cuCtxPopCurrent", 4000, cuCtxPopCurrent_v2)                                                                     \
    F("cuCtxSetCurrent", 4000, cuCtxSetCurrent)                                                                        \
    F("cuCtxGetCurrent", 4000, cuCtxGetCurrent)                                                                        \
    F("cuCtxSynchronize", 2000, cuCtxSynchronize)                                                                      \
    F("cuMemGetInfo", 3020, cuMemGetInfo_v2)                                                                           \
    F("cuMemAlloc", 3020, cuMemAlloc_v2)                                                                               \
    F("cuMemAllocManaged", 6000, cuMemAllocManaged)                                                                    \
    F("cuMemFree", 3020, cuMemFree_v2)                                                                                 \
    F("cuMemcpyHtoD", 3020, cuMemcpyHtoD_v2)                                                                           \
    F("cuMemcpyDtoH", 3020, cuMemcpyDtoH_v2)                                                                           \
    F("cuCtxGetDevice", 2000, cuCtxGetDevice)                                                                          \
    F("cuDeviceGetAttribute", 2000, cuDeviceGetAttribute)                                                              \
    F("cuDevicePrimaryCtxGetState", 7000, cuDevicePrimaryCtxGetState)                                                  \
    F("cuMemGetAllocationGranularity", 10020, cuMemGetAllocationGranularity)                                           \
    F("cuMemCreate", 10020, cuMemCreate)                                                                               \
    F("cuMemRelease", 10020, cuMemRelease)                                                                             \
    F("cuMemAddressReserve", 10020, cuMemAddressReserve)                                                               \
    F("cuMemAddressFree", 10020, cuMemAddressFree)                                                                     \
    F("cuMemMap", 10020, cuMemMap)                                                                                     \
    F("cuMemUnmap", 10020, cuMemUnmap)                                                                                 \
    F("cuMemSetAccess", 10020, cuMemSetAccess)                                                                         \
    F("cuMemExportToShareableHandle", 10020, cuMemExportToShareableHandle)                                             \
    F("cuMemImportFromShareableHandle", 10020, cuMemImportFromShareableHandle)                                         \
    F("cuMemGetAllocationPropertiesFromHandle", 10020, cuMemGetAllocationPropertiesFromHandle)                         \
    F("cuMemRetainAllocationHandle", 11000, cuMemRetainAllocationHandle)                                               \
    F("cuStreamCreate", 2000, cuStreamCreate)                                                                          \
    F("cuStreamSynchronize", 2000, cuStreamSynchronize)                                                                \
    F("cuStreamDestroy", 4000, cuStreamDestroy_v2)                                                                     \
    F("cuMemHostRegister", 6050, cuMemHostRegister_v2)                                                                 \
    F("cuMemHostUnregister", 4000, cuMemHostUnregister)                                                                \
    F("cuMemcpyHtoDAsync", 3020, cuMemcpyHtoDAsync_v2)                                                                 \
    F("cuMemcpyDtoHAsync", 3020, cuMemcpyDtoHAsync_v2)                                                                 \
    F("cuMemcpyDtoDAsync", 3020, cuMemcpyDtoDAsync_v2)                                                                 \
    F("cuMemAllocPitch", 3020, cuMemAllocPitch_v2)                                                                     \
    F("cuMemAllocAsync", 11020, cuMemAllocAsync)                                                                       \
    F("cuMemFreeAsync", 11020, cuMemFreeAsync)                                                                         \
    F("cuMemcpy", 4000, cuMemcpy)                                                                                      \
    F("cuMemcpyAsync", 4000, cuMemcpyAsync)                                                                            \
    F("cuMemcpyDtoD", 3020, cuMemcpyDtoD_v2)                                                                           \
    F("cuMemcpyPeer", 4000, cuMemcpyPeer)                                                                              \
    F("cuMemcpyPeerAsync", 4000, cuMemcpyPeerAsync)                                                                    \
    F("cuMemcpyBatchAsync", 13000, cuMemcpyBatchAsync_v2)                                                              \
    F("cuMemcpy2D", 3020, cuMemcpy2D_v2)                                                                               \
    F("cuMemcpy2DUnaligned", 3020, cuMemcpy2DUnaligned_v2)                                                             \
    F("cuMemcpy2DAsync", 3020, cuMemcpy2DAsync_v2)                                                                     \
    F("cuMemcpy3D", 3020, cuMemcpy3D_v2)                                                                               \
    F("cuMemcpy3DAsync", 3020, cuMemcpy3DAsync_v2)                                                                     \
    F("cuMemsetD8", 3020, cuMemsetD8_v2)                                                                               \
    F("cuMemsetD8Async", 3020, cuMemsetD8Async)                                                                        \
    F("cuMemsetD2D8", 3020, cuMemsetD2D8_v2)                                                                           \
    F("cuMemsetD2D8Async", 3020, cuMemsetD2D8Async)                                                                    \
    F("cuMemsetD16", 3020, cuMemsetD16_v2)                                                                             \
    F("cuMemsetD16Async", 3020, cuMemsetD16Async)                                                                      \
    F("cuMemsetD2D16", 3020, cuMemsetD2D16_v2)                                                                         \
    F("cuMemsetD2D16Async", 3020, cuMemsetD2D16Async)                                                                  \
    F("cuMemsetD32", 3020, cuMemsetD32_v2)                                                                             \
    F("cuMemsetD32Async", 3020, cuMemsetD32Async)                                                                      \
    F("cuMemsetD2D32", 3020, cuMemsetD2D32_v2)                                                                         \
    F("cuMemsetD2D32Async", 3020, cuMemsetD2D32Async)                                                                  \
    F("cuMemGetAddressRange", 3020, cuMemGetAddressRange_v2)                                                           \
    F("cuPointerGetAttribute", 4000, cuPointerGetAttribute)                                                            \
    F("cuPointerGetAttributes", 7000, cuPointerGetAttributes)                                                          \
    F("cuPointerSetAttribute", 6000, cuPointerSetAttribute)                                                            \
    F("cuMemGetAccess", 10020, cuMemGetAccess)                                                                         \
    F("cuMemHostAlloc", 2020, cuMemHostAlloc)                                                                          \
    F("cuMemAllocHost", 3020, cuMemAllocHost_v2)                                                                       \
    F("cuMemFreeHost", 2000, cuMemFreeHost)                                                                            \
    F("cuMemHostGetDevicePointer", 3020, cuMemHostGetDevicePointer_v2)                                                 \
    F("cuStreamCreateWithPriority", 5050, cuStreamCreateWithPriority)                                                  \
    F("cuStreamQuery", 2000, cuStreamQuery)                                                                            \
    F("cuStreamWaitEvent", 3020, cuStreamWaitEvent)                                                                    \
    F("cuStreamWriteValue32", 11070, cuStreamWriteValue32_v2)                                                          \
    F("cuStreamWriteValue64", 11070, cuStreamWriteValue64_v2)                                                          \
    F("cuStreamWaitValue32", 11070, cuStreamWaitValue32_v2)                                                            \
    F("cuStreamWaitValue64", 11070, cuStreamWaitValue64_v2)                                                            \
    F("cuStreamBatchMemOp", 11070, cuStreamBatchMemOp_v2)                                                              \
    F("cuEventCreate", 2000, cuEventCreate)                                                                            \
    F("cuEventRecord", 2000, cuEventRecord)                                                                            \
    F("cuEventQuery", 2000, cuEventQuery)                                                                              \
    F("cuEventSynchronize", 2000, cuEventSynchronize)                                                                  \
    F("cuEventElapsedTime", 2000, cuEventElapsedTime)                                                                  \
    F("cuEventDestroy", 4000, cuEventDestroy_v2)                                                                       \
    F("cuGraphCreate", 10000, cuGraphCreate)                                                                           \
    F("cuGraphAddMemcpyNode", 10000, cuGraphAddMemcpyNode)                                                             \
    F("cuGraphAddMemsetNode", 10000, cuGraphAddMemsetNode)                                                             \
    F("cuGraphInstantiate", 12000, cuGraphInstantiateWithFlags)                                                        \
    F("cuGraphInstantiateWithFlags", 11040, cuGraphInstantiateWithFlags)                                               \
    F("cuGraphLaunch", 10000, cuGraphLaunch)                                                                           \
    F("cuGraphExecDestroy", 10000, cuGraphExecDestroy)                                                                 \
    F("cuGraphDestroy", 10000, cuGraphDestroy)                                                                         \
    F("cuModuleLoadData", 2000, cuModuleLoadData)                                                                      \
    F("cuModuleGetFunction", 2000, cuModuleGetFunction)                                                                \
    F("cuLaunchKernel", 4000, cuLaunchKernel)                                                                          \
    F("cuCheckpointProcessGetState", 12080, cuCheckpointProcessGetState)                                               \
    F("cuCheckpointProcessGetRestoreThreadId", 12080, cuCheckpointProcessGetRestoreThreadId)                           \
    F("cuCheckpointProcessLock", 12080, cuCheckpointProcessLock)                                                       \
    F("cuCheckpointProcessCheckpoint", 12080, cuCheckpointProcessCheckpoint)                                           \
    F("cuCheckpointProcessRestore", 12080, cuCheckpointProcessRestore)                                                 \
    F("cuCheckpointProcessUnlock", 12080, cuCheckpointProcessUnlock)

typedef void entry(void); /* only their addresses are used here */
#define DECLARE(name, version, function) extern entry function;
FUNCTIONS(DECLARE)

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status);
EXPORT CUresult cuGetProcAddress(const char *name, void **found, int version, uint64_t flags);

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status)
{
#define LIST(name, version, function) {name, version, function},
    static const struct {
        const char *name;
        int version;
        entry *function;
    } TABLE[] = {
        FUNCTIONS(LIST) /* several versions of a name are listed upwards */
        {"cuGetProcAddress", 11030, (entry *)cuGetProcAddress},
        {"cuGetProcAddress", 12000, (entry *)cuGetProcAddress_v2},
    };

    (void)flags;
    int best = -1;
    for (size_t i = 0; i < sizeof TABLE / sizeof *TABLE; i++)
        if (strcmp(TABLE[i].name, name) == 0 && TABLE[i].version <= version)
            best = (int)i;
    if (best >= 0 && call_is_missing(name))
        best = -1;
    *found = best >= 0 ? (void *)TABLE[best].function : NULL;
    if (status)
        *status = best >= 0 ? 0 : 1;
    return best >= 0 ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuGetProcAddress(const char *name, void **found, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(name, found, version, flags, NULL);
}

/* NVIDIA's own libraries ask for what is in no manual: NVRTC does where there is a GPU, and does well without. */
EXPORT CUresult cuGetExportTable(const void **table, const CUuuid *id);
EXPORT CUresult cuGetExportTable(const void **table, const CUuuid *id)
{
    (void)id;
    *table = NULL;
    return CUDA_ERROR_NOT_FOUND;
}
