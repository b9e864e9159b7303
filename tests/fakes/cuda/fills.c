/* cuMemset and its variants, which wait for the driver's lock before they look at a pointer.
 * A test double: see abi.h.
 */
#include "fills.h"

#include <string.h>

CUresult do_fill(const struct fill *fill)
{
    size_t row = fill->width * fill->bytes;
    char *to = fill->width && fill->height ? translate(fill->to, (fill->height - 1) * fill->pitch + row) : NULL;
    if (!to)
        return fill->width && fill->height ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    for (size_t y = 0; y < fill->height; y++)
        for (size_t x = 0; x < row; x += fill->bytes)
            memcpy(to + y * fill->pitch + x, &fill->value, fill->bytes); /* on a machine of the low byte first */
    return CUDA_SUCCESS;
}

static CUresult run(const char *name, const struct fill *fill)
{
    CUresult result = enter_function(name);
    if (result)
        return result;
    result = do_fill(fill);
    leave();
    return result;
}

#define FILLS(bits)                                                                                                    \
    EXPORT CUresult cuMemsetD##bits##_v2(CUdeviceptr to, uint##bits##_t value, size_t count)                           \
    {                                                                                                                  \
        return run(__func__, &(struct fill){to, value, bits / 8, 0, count, 1});                                        \
    }                                                                                                                  \
    EXPORT CUresult cuMemsetD##bits##Async(CUdeviceptr to, uint##bits##_t value, size_t count, CUstream stream)        \
    {                                                                                                                  \
        (void)stream;                                                                                                  \
        return run(__func__, &(struct fill){to, value, bits / 8, 0, count, 1});                                        \
    }                                                                                                                  \
    EXPORT CUresult cuMemsetD2D##bits##_v2(CUdeviceptr to, size_t pitch, uint##bits##_t value, size_t width,           \
                                           size_t height)                                                              \
    {                                                                                                                  \
        return run(__func__, &(struct fill){to, value, bits / 8, pitch, width, height});                               \
    }                                                                                                                  \
    EXPORT CUresult cuMemsetD2D##bits##Async(CUdeviceptr to, size_t pitch, uint##bits##_t value, size_t width,         \
                                             size_t height, CUstream stream)                                           \
    {                                                                                                                  \
        (void)stream;                                                                                                  \
        return run(__func__, &(struct fill){to, value, bits / 8, pitch, width, height});                               \
    }

FILLS(8)
FILLS(16)
FILLS(32)
