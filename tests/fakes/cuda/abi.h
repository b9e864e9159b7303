/* The part of the CUDA driver's binary interface that the pretended driver offers.
 *
 * A TEST DOUBLE. It stands in for NVIDIA's libcuda.so.1 on machines without a GPU, so that every path of a GPU
 * checkpoint can be tested there; the truth is the real GPU. Names, numbers and layouts are those of the public
 * driver API (CUDA 13.0). Error codes of illegal moves, missing processes and failed restores are those that driver
 * 580.159.04 was measured to give on an H100.
 */
#ifndef FAKE_CUDA_ABI_H
#define FAKE_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct context *CUcontext;
typedef const struct kernel *CUfunction;
typedef void *CUmodule;
typedef void *CUstream;

typedef struct {
    unsigned char bytes[16];
} CUuuid;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_OPERATING_SYSTEM = 304,
    CUDA_ERROR_ILLEGAL_STATE = 401,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_UNKNOWN = 999,
};

typedef enum { RUNNING = 0, LOCKED = 1, CHECKPOINTED = 2, FAILED = 3 } CUprocessState;

typedef struct {
    CUuuid old, new;
} CUcheckpointGpuPair;

typedef struct {
    unsigned int timeout_ms, reserved0;
    uint64_t reserved1[7];
} CUcheckpointLockArgs;

typedef struct {
    CUcheckpointGpuPair *pairs;
    unsigned int pair_count, padding;
    void **custom_storage;
    char reserved[40];
} CUcheckpointRestoreArgs;

#endif
