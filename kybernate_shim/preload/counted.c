/* Allocations that remain the driver's own and are counted, and the size of the GPU's memory as reported to the
 * program. */
#include "charges.h"
#include "driver.h"
#include "ledger.h"
#include "uses.h"

#define EXPORT __attribute__((visibility("default")))

static const size_t ROW = 512; /* what the rows of a pitched allocation are rounded up to */

EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *address, size_t *pitch, size_t width, size_t height, unsigned int element);
EXPORT CUresult cuMemAllocManaged(CUdeviceptr *address, size_t size, unsigned int flags);
EXPORT CUresult cuMemAllocAsync(CUdeviceptr *address, size_t size, CUstream stream);
EXPORT CUresult cuMemAllocAsync_ptsz(CUdeviceptr *address, size_t size, CUstream stream);
EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t size, CUmemoryPool pool, CUstream stream);
EXPORT CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *address, size_t size, CUmemoryPool pool, CUstream stream);
EXPORT CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream);
EXPORT CUresult cuMemFreeAsync_ptsz(CUdeviceptr address, CUstream stream);
EXPORT CUresult cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *wanted);
EXPORT CUresult cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *wanted);
EXPORT CUresult cuArrayDestroy(CUarray array);
EXPORT CUresult cuMipmappedArrayCreate(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *wanted, unsigned int levels);
EXPORT CUresult cuMipmappedArrayDestroy(CUarray array);
EXPORT CUresult cuMemGetInfo_v2(size_t *available, size_t *total);
EXPORT CUresult cuDeviceTotalMem_v2(size_t *total, CUdevice device);

/* The driver's call with what the program has passed, counted as `size` bytes. */
#define COUNTED(size, call, by, name, ...)                                                                             \
    struct charge charge;                                                                                              \
    note_use();                                                                                                        \
    if (!begin_charge(&charge, size))                                                                                  \
        return CUDA_ERROR_OUT_OF_MEMORY;                                                                               \
    CUresult result = driver()->call ? driver()->call(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND;                             \
    return end_charge(&charge, result, by, result ? 0 : (uint64_t)(name))

#define REFUNDED(call, by, name, ...)                                                                                  \
    note_use();                                                                                                        \
    CUresult result = driver()->call ? driver()->call(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND;                             \
    if (result == CUDA_SUCCESS)                                                                                        \
        refund(by, (uint64_t)(name));                                                                                  \
    return result

static size_t times(size_t one, size_t other)
{
    size_t product;
    return __builtin_mul_overflow(one, other, &product) ? SIZE_MAX : product;
}

EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *address, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    size_t row = width > SIZE_MAX - ROW ? SIZE_MAX : (width + ROW - 1) / ROW * ROW;
    COUNTED(times(row, height), pitch, AT_ADDRESS, *address, address, pitch, width, height, element);
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *address, size_t size, unsigned int flags)
{
    COUNTED(size, managed, AT_ADDRESS, *address, address, size, flags);
}

EXPORT CUresult cuMemAllocAsync(CUdeviceptr *address, size_t size, CUstream stream)
{
    COUNTED(size, async, AT_ADDRESS, *address, address, size, stream);
}

EXPORT CUresult cuMemAllocAsync_ptsz(CUdeviceptr *address, size_t size, CUstream stream)
{
    COUNTED(size, async_ptsz, AT_ADDRESS, *address, address, size, stream);
}

EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t size, CUmemoryPool pool, CUstream stream)
{
    COUNTED(size, pool, AT_ADDRESS, *address, address, size, pool, stream);
}

EXPORT CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *address, size_t size, CUmemoryPool pool, CUstream stream)
{
    COUNTED(size, pool_ptsz, AT_ADDRESS, *address, address, size, pool, stream);
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream)
{
    REFUNDED(free_async, AT_ADDRESS, address, address, stream);
}

EXPORT CUresult cuMemFreeAsync_ptsz(CUdeviceptr address, CUstream stream)
{
    REFUNDED(free_async_ptsz, AT_ADDRESS, address, address, stream);
}

/* Bytes of a channel: the formats of one to four bytes, signed or not, and of floating point. */
static size_t channel(int format)
{
    switch (format) {
    case 0x01:
    case 0x08:
        return 1;
    case 0x02:
    case 0x09:
    case 0x10:
        return 2;
    default:
        return 4;
    }
}

static size_t bytes_of(size_t width, size_t height, size_t depth, int format, unsigned int channels)
{
    size_t pixels = times(times(width, height ? height : 1), depth ? depth : 1);
    return times(times(pixels, channels), channel(format));
}

EXPORT CUresult cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *wanted)
{
    size_t size = wanted ? bytes_of(wanted->width, wanted->height, 1, wanted->format, wanted->channels) : 0;
    COUNTED(size, array, BY_ARRAY, (uintptr_t)*array, array, wanted);
}

static size_t bytes_of_3d(const CUDA_ARRAY3D_DESCRIPTOR *wanted)
{
    return wanted ? bytes_of(wanted->width, wanted->height, wanted->depth, wanted->format, wanted->channels) : 0;
}

EXPORT CUresult cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *wanted)
{
    COUNTED(bytes_of_3d(wanted), array_3d, BY_ARRAY, (uintptr_t)*array, array, wanted);
}

EXPORT CUresult cuMipmappedArrayCreate(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *wanted, unsigned int levels)
{
    size_t first = bytes_of_3d(wanted), smaller = levels > 1 ? first / 3 : 0;
    COUNTED(first > SIZE_MAX - smaller ? SIZE_MAX : first + smaller, mipmap, BY_ARRAY, (uintptr_t)*array, array, wanted,
            levels);
}

EXPORT CUresult cuArrayDestroy(CUarray array)
{
    REFUNDED(array_end, BY_ARRAY, (uintptr_t)array, array);
}

EXPORT CUresult cuMipmappedArrayDestroy(CUarray array)
{
    REFUNDED(mipmap_end, BY_ARRAY, (uintptr_t)array, array);
}

/* As if the GPU had no more than is declared: programs that use a share of the memory query this. */
EXPORT CUresult cuMemGetInfo_v2(size_t *available, size_t *total)
{
    CUdevice device;
    CUresult result = driver()->info ? driver()->info(available, total) : CUDA_ERROR_NOT_FOUND;
    size_t most = declared_bytes();
    if (result || !most || driver()->device(&device) || device < 0 || device >= MOST_DEVICES)
        return result;
    size_t used = ledger_sum(device), left = used < most ? most - used : 0;
    if (*total > most)
        *total = most;
    if (*available > left)
        *available = left;
    return result;
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *total, CUdevice device)
{
    CUresult result = driver()->total ? driver()->total(total, device) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS && declared_bytes() && *total > declared_bytes())
        *total = declared_bytes();
    return result;
}
