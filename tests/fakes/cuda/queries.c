/* What a program can ask about a pointer. A test double: see abi.h. */
#include <string.h>

#include "pinned.h"
#include "pointers.h"

/* CUpointer_attribute. */
enum {
    CONTEXT = 1,
    MEMORY_TYPE,
    DEVICE_POINTER,
    HOST_POINTER,
    SYNC_MEMOPS = 6,
    BUFFER_ID,
    IS_MANAGED,
    DEVICE_ORDINAL,
    RANGE_START = 11,
    RANGE_SIZE,
    IS_MAPPED,
};
enum { ON_HOST = 1, ON_GPU = 2 };

struct about {
    struct found range;
    bool on_host;
};

/* Takes a lock for host memory only, which no call on device memory waits for. */
static bool find(CUdeviceptr address, struct about *about)
{
    struct host_range range;
    about->on_host = !is_device_address(address);
    if (!about->on_host)
        return names_memory(address, 1, &about->range);
    if (!is_pinned((char *)(uintptr_t)address, &range))
        return false;
    about->range = (struct found){(CUdeviceptr)(uintptr_t)range.start, range.size, current_device()};
    return true;
}

#define ANSWER(type, value)                                                                                            \
    do {                                                                                                               \
        *(type *)data = (type)(value);                                                                                 \
        return CUDA_SUCCESS;                                                                                           \
    } while (0)

static CUresult tell(void *data, int attribute, CUdeviceptr address, const struct about *about)
{
    switch (attribute) {
    case CONTEXT: /* as for memory that a program maps itself; of others it is not kept */
        ANSWER(CUcontext, NULL);
    case MEMORY_TYPE:
        ANSWER(int, about->on_host ? ON_HOST : ON_GPU);
    case DEVICE_POINTER:
        ANSWER(CUdeviceptr, address);
    case HOST_POINTER:
        if (!about->on_host)
            return CUDA_ERROR_INVALID_VALUE;
        ANSWER(CUdeviceptr, address);
    case SYNC_MEMOPS:
    case IS_MANAGED:
        ANSWER(bool, false);
    case BUFFER_ID:
    case RANGE_START:
        ANSWER(CUdeviceptr, about->range.start);
    case DEVICE_ORDINAL:
        ANSWER(int, about->range.device);
    case RANGE_SIZE:
        ANSWER(size_t, about->range.size);
    case IS_MAPPED:
        ANSWER(bool, true);
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

static size_t bytes_of(int attribute)
{
    switch (attribute) {
    case MEMORY_TYPE:
    case DEVICE_ORDINAL:
        return sizeof(int);
    case SYNC_MEMOPS:
    case IS_MANAGED:
    case IS_MAPPED:
        return sizeof(bool);
    default:
        return sizeof(CUdeviceptr);
    }
}

EXPORT CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address)
{
    struct about about;
    if (!process.started)
        return CUDA_ERROR_NOT_INITIALIZED;
    return find(address, &about) ? tell(data, attribute, address, &about) : CUDA_ERROR_INVALID_VALUE;
}

/* Succeeds for any pointer, and answers with zeros about one that the driver does not know. */
EXPORT CUresult cuPointerGetAttributes(unsigned int count, const int *attributes, void **data, CUdeviceptr address)
{
    struct about about;
    if (!process.started)
        return CUDA_ERROR_NOT_INITIALIZED;
    bool known = find(address, &about);
    for (unsigned i = 0; i < count; i++)
        if (!known || tell(data[i], attributes[i], address, &about) != CUDA_SUCCESS)
            memset(data[i], 0, bytes_of(attributes[i]));
    return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerSetAttribute(const void *value, int attribute, CUdeviceptr address)
{
    (void)value;
    CUresult result = enter_with(__func__, address, 1);
    if (result)
        return result;
    leave();
    return attribute == SYNC_MEMOPS ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *start, size_t *size, CUdeviceptr address)
{
    struct about about;
    CUresult result = enter();
    if (result)
        return result;
    result = find(address, &about) ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS && start)
        *start = about.range.start;
    if (result == CUDA_SUCCESS && size)
        *size = about.range.size;
    leave();
    return result;
}
