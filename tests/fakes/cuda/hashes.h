/* The arena's own kernels, on a pretended GPU. A test double: see abi.h. */
#ifndef FAKE_CUDA_HASHES_H
#define FAKE_CUDA_HASHES_H

#include "abi.h"

struct kernel {
    const char *name;
    CUresult (*run)(unsigned blocks, void **parameters);
};

CUresult hash_all(unsigned blocks, void **parameters);
CUresult finish_all(unsigned blocks, void **parameters);

#endif
