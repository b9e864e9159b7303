/* The part of the CUDA driver's binary interface that the library intercepts.
 *
 * Names, numbers and layouts are those of the public driver API; every one of them has been stable since CUDA 11.3.
 * Source: docs.nvidia.com "CUDA Driver API", virtual memory management.
 */
#ifndef KYBERNATE_PRELOAD_ABI_H
#define KYBERNATE_PRELOAD_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef uint64_t CUhandle; /* CUmemGenericAllocationHandle */
typedef void *CUcontext;
typedef void *CUstream;
typedef void *CUmemoryPool;
typedef void *CUarray; /* and CUmipmappedArray */

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_SYSTEM_NOT_READY = 802,
};

enum { MOST_DEVICES = 64 }; /* our own limit: each has a bit in a block's mask */
enum { PINNED = 1, ON_DEVICE = 1, AS_DESCRIPTOR = 1, READ_WRITE = 3, MINIMUM = 0 };
enum { RDMA_WITH_VIRTUAL_MEMORY = 110 }; /* a device attribute */

typedef struct {
    int type, id;
} CUmemLocation;

typedef struct {
    int type;
    int handle_types;
    CUmemLocation location;
    void *win32;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
} CUmemAllocationProp;

typedef struct {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;

/* Formats are bit masks of one to four bytes for each channel, and larger numbers for blocks of pixels. */
typedef struct {
    size_t width, height;
    int format;
    unsigned int channels;
} CUDA_ARRAY_DESCRIPTOR;

typedef struct {
    size_t width, height, depth;
    int format;
    unsigned int channels, flags;
} CUDA_ARRAY3D_DESCRIPTOR;

#endif
