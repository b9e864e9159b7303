/* Host memory that is registered, or that the driver makes. Its device addresses are its host addresses.
 * A test double: see abi.h.
 */
#include "pinned.h"

#include <sys/mman.h>

enum { MOST = 4096 };

static struct host_range pinned[MOST];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct host_range *find(const char *start, size_t size)
{
    for (int i = 0; i < MOST; i++)
        if (pinned[i].size && start < pinned[i].start + pinned[i].size && start + size > pinned[i].start)
            return &pinned[i];
    return NULL;
}

static CUresult add(void *start, size_t size, bool made)
{
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    if (find(start, size))
        result = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    for (int i = 0; i < MOST && result == CUDA_ERROR_OUT_OF_MEMORY; i++)
        if (!pinned[i].size) {
            pinned[i] = (struct host_range){start, size, made};
            result = CUDA_SUCCESS;
        }
    pthread_mutex_unlock(&lock);
    return result;
}

static CUresult drop(const char *name, void *start, bool made)
{
    CUresult result = enter_function(name);
    if (result)
        return result;
    pthread_mutex_lock(&lock);
    struct host_range *it = find(start, 1);
    result = it && it->start == start && it->made == made ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS && made)
        munmap(it->start, it->size);
    if (result == CUDA_SUCCESS)
        it->size = 0;
    pthread_mutex_unlock(&lock);
    leave();
    return result;
}

EXPORT CUresult cuMemHostRegister_v2(void *start, size_t size, unsigned int flags)
{
    (void)flags;
    CUresult result = enter();
    if (result)
        return result;
    result = add(start, size, false);
    leave();
    return result;
}

EXPORT CUresult cuMemHostUnregister(void *start)
{
    return drop(__func__, start, false);
}

EXPORT CUresult cuMemHostAlloc(void **start, size_t size, unsigned int flags)
{
    (void)flags;
    CUresult result = enter();
    if (result)
        return result;
    void *made = size ? mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) : MAP_FAILED;
    result = made == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : add(made, size, true);
    if (result == CUDA_SUCCESS)
        *start = made;
    else if (made != MAP_FAILED)
        munmap(made, size);
    leave();
    return result;
}

EXPORT CUresult cuMemAllocHost_v2(void **start, size_t size)
{
    return cuMemHostAlloc(start, size, 0);
}

EXPORT CUresult cuMemFreeHost(void *start)
{
    return drop(__func__, start, true);
}

EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *address, void *host, unsigned int flags)
{
    CUresult result = enter();
    if (result)
        return result;
    result = flags || !is_pinned(host, NULL) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS)
        *address = (CUdeviceptr)(uintptr_t)host;
    leave();
    return result;
}

bool is_pinned(const char *address, struct host_range *range)
{
    pthread_mutex_lock(&lock);
    const struct host_range *it = find(address, 1);
    if (it && range)
        *range = *it;
    pthread_mutex_unlock(&lock);
    return it;
}

bool crosses_pinned(const char *start, size_t size)
{
    pthread_mutex_lock(&lock);
    const struct host_range *it = find(start, size);
    bool found = it && (start < it->start || start + size > it->start + it->size);
    pthread_mutex_unlock(&lock);
    return found;
}
