/* Copies between host and GPU, which are done before the call returns, as if the GPU were infinitely fast.
 * A test double: see abi.h.
 */
#include "copies.h"

#include <string.h>

#include "pinned.h"

enum { ON_HOST = 1, ON_GPU = 2, UNIFIED = 4 }; /* CUmemorytype; 3 is an array */

#define HOST(pointer) ((CUdeviceptr)(uintptr_t)(pointer))

/* Bytes from the first to the last of one end. */
static size_t extent(const struct end *end, const struct copy *copy)
{
    return (copy->depth - 1) * end->plane + (copy->height - 1) * end->pitch + copy->width;
}

static bool is_empty(const struct copy *copy)
{
    return !copy->width || !copy->height || !copy->depth;
}

static bool end_is_valid(const struct end *end, const struct copy *copy)
{
    return !is_device_address(end->address) || names_memory(end->address, extent(end, copy), NULL);
}

bool copy_is_valid(const struct copy *copy)
{
    return is_empty(copy) || (end_is_valid(&copy->to, copy) && end_is_valid(&copy->from, copy));
}

static char *host_address(const struct end *end, const struct copy *copy)
{
    char *host = (char *)(uintptr_t)end->address;
    if (is_device_address(end->address))
        return translate(end->address, extent(end, copy));
    return copy->is_async && crosses_pinned(host, extent(end, copy)) ? NULL : host;
}

CUresult do_copy(const struct copy *copy)
{
    if (is_empty(copy))
        return CUDA_SUCCESS;
    char *to = host_address(&copy->to, copy);
    const char *from = host_address(&copy->from, copy);
    if (!to || !from)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t z = 0; z < copy->depth; z++)
        for (size_t y = 0; y < copy->height; y++)
            memmove(to + z * copy->to.plane + y * copy->to.pitch, from + z * copy->from.plane + y * copy->from.pitch,
                    copy->width);
    return CUDA_SUCCESS;
}

static CUresult run(const char *name, const struct copy *copy)
{
    if (process.started && !copy_is_valid(copy))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = enter_function(name);
    if (result)
        return result;
    result = do_copy(copy);
    leave();
    return result;
}

static CUresult run_bytes(const char *name, CUdeviceptr to, CUdeviceptr from, size_t size, bool is_async)
{
    return run(name, &(struct copy){{to, size, size}, {from, size, size}, size, 1, 1, is_async});
}

EXPORT CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t size)
{
    return run_bytes(__func__, to, from, size, false);
}

EXPORT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)
{
    (void)stream;
    return run_bytes(__func__, to, from, size, true);
}

EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size)
{
    return run_bytes(__func__, to, HOST(from), size, false);
}

EXPORT CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size)
{
    return run_bytes(__func__, HOST(to), from, size, false);
}

EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t size)
{
    return run_bytes(__func__, to, from, size, false);
}

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, CUstream stream)
{
    (void)stream;
    return run_bytes(__func__, to, HOST(from), size, true);
}

EXPORT CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, CUstream stream)
{
    (void)stream;
    return run_bytes(__func__, HOST(to), from, size, true);
}

EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)
{
    (void)stream;
    return run_bytes(__func__, to, from, size, true);
}

EXPORT CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext there, CUdeviceptr from, CUcontext here, size_t size)
{
    (void)there, (void)here;
    return run_bytes(__func__, to, from, size, false);
}

EXPORT CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext there, CUdeviceptr from, CUcontext here, size_t size,
                                  CUstream stream)
{
    (void)there, (void)here, (void)stream;
    return run_bytes(__func__, to, from, size, true);
}

EXPORT CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count,
                                      const void *attributes, size_t *indices, size_t attribute_count, CUstream stream)
{
    (void)attributes, (void)indices, (void)attribute_count, (void)stream;
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < count && !result; i++)
        result = run_bytes(__func__, to[i], from[i], sizes[i], true);
    return result;
}

static bool read_address(int type, void *host, CUdeviceptr device, CUdeviceptr *address)
{
    *address = type == ON_HOST ? HOST(host) : device;
    return type == ON_HOST || type == UNIFIED || type == ON_GPU;
}

struct side2d {
    size_t x, y;
    int type;
    void *host;
    CUdeviceptr device;
    void *array;
    size_t pitch;
};

typedef struct {
    struct side2d from, to;
    size_t width, height;
} CUDA_MEMCPY2D;

static bool read_side2d(const struct side2d *side, size_t width, struct end *end)
{
    CUdeviceptr address;
    size_t pitch = side->pitch ? side->pitch : width;
    bool known = read_address(side->type, side->host, side->device, &address);
    *end = (struct end){address + side->y * pitch + side->x, pitch, 0};
    return known;
}

static CUresult run2d(const char *name, const CUDA_MEMCPY2D *asked, bool is_async)
{
    struct copy copy = {.width = asked->width, .height = asked->height, .depth = 1, .is_async = is_async};
    if (!read_side2d(&asked->to, asked->width, &copy.to) || !read_side2d(&asked->from, asked->width, &copy.from))
        return CUDA_ERROR_NOT_SUPPORTED;
    return run(name, &copy);
}

EXPORT CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D *asked)
{
    return run2d(__func__, asked, false);
}

EXPORT CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *asked)
{
    return run2d(__func__, asked, false);
}

EXPORT CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *asked, CUstream stream)
{
    (void)stream;
    return run2d(__func__, asked, true);
}

static bool read_side3d(const struct side3d *side, const CUDA_MEMCPY3D *asked, struct end *end)
{
    CUdeviceptr address;
    size_t pitch = side->pitch ? side->pitch : asked->width;
    size_t plane = pitch * (side->height ? side->height : asked->height);
    bool known = read_address(side->type, side->host, side->device, &address);
    *end = (struct end){address + side->z * plane + side->y * pitch + side->x, pitch, plane};
    return known;
}

bool read_copy3d(const CUDA_MEMCPY3D *asked, struct copy *copy)
{
    *copy = (struct copy){.width = asked->width, .height = asked->height, .depth = asked->depth};
    return read_side3d(&asked->to, asked, &copy->to) && read_side3d(&asked->from, asked, &copy->from);
}

static CUresult run3d(const char *name, const CUDA_MEMCPY3D *asked, bool is_async)
{
    struct copy copy;
    if (!read_copy3d(asked, &copy))
        return CUDA_ERROR_NOT_SUPPORTED;
    copy.is_async = is_async;
    return run(name, &copy);
}

EXPORT CUresult cuMemcpy3D_v2(const CUDA_MEMCPY3D *asked)
{
    return run3d(__func__, asked, false);
}

EXPORT CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *asked, CUstream stream)
{
    (void)stream;
    return run3d(__func__, asked, true);
}
