/* Streams and events. What is queued is done before the call returns.
 *
 * What asks whether work is done was measured to wait for no lock: also while a process is locked, it reads the GPU's
 * semaphores and returns. A test double: see abi.h.
 */
#include <stdlib.h>
#include <time.h>

#include "process.h"

typedef struct event {
    struct timespec recorded;
} *CUevent;

/* What a call does that waits for nothing but the gate. */
static CUresult pass_function(const char *name)
{
    CUresult result = enter_function(name);
    if (result == CUDA_SUCCESS)
        leave();
    return result;
}
#define pass() pass_function(__func__)

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

EXPORT CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority)
{
    (void)priority;
    return cuStreamCreate(stream, flags);
}

EXPORT CUresult cuStreamSynchronize(CUstream stream)
{
    (void)stream;
    return read_semaphores();
}

EXPORT CUresult cuStreamQuery(CUstream stream)
{
    (void)stream;
    return read_semaphores();
}

EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags)
{
    (void)stream, (void)event, (void)flags;
    return pass();
}

EXPORT CUresult cuStreamDestroy_v2(CUstream stream)
{
    (void)stream;
    return pass();
}

EXPORT CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
    (void)flags;
    CUresult result = enter();
    if (result)
        return result;
    *event = calloc(1, sizeof **event);
    leave();
    return *event ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream stream)
{
    (void)stream;
    CUresult result = enter();
    if (result)
        return result;
    clock_gettime(CLOCK_MONOTONIC, &event->recorded);
    leave();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventQuery(CUevent event)
{
    (void)event;
    return read_semaphores();
}

EXPORT CUresult cuEventSynchronize(CUevent event)
{
    (void)event;
    return read_semaphores();
}

EXPORT CUresult cuEventElapsedTime(float *milliseconds, CUevent from, CUevent to)
{
    CUresult result = read_semaphores();
    if (result)
        return result;
    *milliseconds = (float)(to->recorded.tv_sec - from->recorded.tv_sec) * 1e3f +
                    (float)(to->recorded.tv_nsec - from->recorded.tv_nsec) / 1e6f;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventDestroy_v2(CUevent event)
{
    CUresult result = pass();
    if (result == CUDA_SUCCESS)
        free(event);
    return result;
}
