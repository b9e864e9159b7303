/* Host memory that the GPU may use. A test double: see abi.h. */
#ifndef FAKE_CUDA_PINNED_H
#define FAKE_CUDA_PINNED_H

#include "process.h"

/* Tell whether [start, start + size) leaves the registered range that it begins or ends in: an asynchronous copy must
 * not. Measured with driver 580.159.04 on an H100. */
bool crosses_pinned(const char *start, size_t size);

/* Tell whether an address lies in such memory; `range` receives its begin and size, and may be NULL. */
struct host_range {
    char *start;
    size_t size; /* 0: this entry is free */
    bool made;   /* by cuMemHostAlloc, and not by the program */
};
bool is_pinned(const char *address, struct host_range *range);

#endif
