/* Filling device memory with one value. A test double: see abi.h. */
#ifndef FAKE_CUDA_FILLS_H
#define FAKE_CUDA_FILLS_H

#include "pointers.h"

struct fill {
    CUdeviceptr to;
    uint32_t value;
    unsigned bytes; /* of the value: 1, 2 or 4 */
    size_t pitch;   /* bytes from one row to the next */
    size_t width, height; /* values, rows */
};

/* Do it, with the gate passed. */
CUresult do_fill(const struct fill *fill);

#endif
