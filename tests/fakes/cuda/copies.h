/* Copies of rows, planes and boxes between host and GPU. A test double: see abi.h. */
#ifndef FAKE_CUDA_COPIES_H
#define FAKE_CUDA_COPIES_H

#include "pointers.h"

/* One end of a copy. */
struct end {
    CUdeviceptr address; /* of the GPU or, in a unified address space, of the host */
    size_t pitch, plane; /* bytes from one row to the next, and from one plane to the next */
};

struct copy {
    struct end to, from;
    size_t width, height, depth; /* bytes, rows, planes */
    bool is_async;
};

/* CUDA_MEMCPY3D. */
struct side3d {
    size_t x, y, z, level;
    int type;
    void *host;
    CUdeviceptr device;
    void *array, *reserved;
    size_t pitch, height;
};

typedef struct {
    struct side3d from, to;
    size_t width, height, depth;
} CUDA_MEMCPY3D;

/* Read what the program asks for; false: it is of no kind that is copied here. */
bool read_copy3d(const CUDA_MEMCPY3D *asked, struct copy *copy);

/* Tell whether both ends name memory: what the driver looks at before it waits. Takes no lock. */
bool copy_is_valid(const struct copy *copy);

/* Do it, with the gate passed. */
CUresult do_copy(const struct copy *copy);

#endif
