/* Streams and pinned host memory. Copies are done before the call returns, as if the card were infinitely fast.
 * A test double: see abi.h.
 */
#include <string.h>

#include "process.h"

enum { MOST = 4096 };

static struct {
    char *start;
    size_t size; /* 0: free */
} pinned[MOST];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
    (void)flags;
    CUresult result = enter();
    if (result)
        return result;
    *stream = stream; /* any address that is not NULL */
    result = current_device() < 0 ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
    leave();
    return result;
}

EXPORT CUresult cuStreamSynchronize(CUstream stream)
{
    (void)stream;
    CUresult result = enter();
    if (result == CUDA_SUCCESS)
        leave();
    return result;
}

EXPORT CUresult cuStreamDestroy_v2(CUstream stream)
{
    return cuStreamSynchronize(stream);
}

EXPORT CUresult cuMemHostRegister_v2(void *start, size_t size, unsigned int flags)
{
    (void)flags;
    CUresult result = enter();
    if (result)
        return result;
    result = CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST && result != CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED; i++)
        if (pinned[i].size && (char *)start < pinned[i].start + pinned[i].size &&
            (char *)start + size > pinned[i].start)
            result = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    for (int i = 0; i < MOST && result == CUDA_ERROR_OUT_OF_MEMORY; i++)
        if (!pinned[i].size) {
            pinned[i].start = start;
            pinned[i].size = size;
            result = CUDA_SUCCESS;
        }
    pthread_mutex_unlock(&lock);
    leave();
    return result;
}

EXPORT CUresult cuMemHostUnregister(void *start)
{
    CUresult result = enter();
    if (result)
        return result;
    result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST && result; i++)
        if (pinned[i].size && pinned[i].start == start) {
            pinned[i].size = 0;
            result = CUDA_SUCCESS;
        }
    pthread_mutex_unlock(&lock);
    leave();
    return result;
}

/* A copy must not leave the registered range that it begins in. Measured with driver 580.159.04 on an H100. */
static bool crosses(const char *start, size_t size)
{
    bool found = false;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST && !found; i++)
        if (pinned[i].size && start < pinned[i].start + pinned[i].size && start + size > pinned[i].start)
            found = start < pinned[i].start || start + size > pinned[i].start + pinned[i].size;
    pthread_mutex_unlock(&lock);
    return found;
}

extern CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size);
extern CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size);

EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)
{
    (void)stream;
    CUresult result = enter();
    if (result)
        return result;
    void *target = translate(to, size);
    const void *source = translate(from, size);
    if (target && source)
        memcpy(target, source, size);
    leave();
    return target && source ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, CUstream stream)
{
    (void)stream;
    return crosses(from, size) ? CUDA_ERROR_INVALID_VALUE : cuMemcpyHtoD_v2(to, from, size);
}

EXPORT CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, CUstream stream)
{
    (void)stream;
    return crosses(to, size) ? CUDA_ERROR_INVALID_VALUE : cuMemcpyDtoH_v2(to, from, size);
}
