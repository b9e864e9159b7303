/* The "kernels" that a program can launch, by name; what the module's image holds does not matter.
 *
 * They run to their end inside cuLaunchKernel, so that a lock waits for them as it does for queued work.
 * A test double: see abi.h.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "hashes.h"
#include "pointers.h"
#include "switches.h"

static _Atomic unsigned launches;

/* advance(CUdeviceptr words, uint64_t count): one step of a linear congruential generator on every word. */
static CUresult advance(unsigned blocks, void **parameters)
{
    (void)blocks;
    CUdeviceptr address = *(CUdeviceptr *)parameters[0];
    uint64_t count = *(uint64_t *)parameters[1];
    uint32_t *words = translate(address, count * sizeof *words);
    if (!words)
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    for (uint64_t i = 0; i < count; i++)
        words[i] = words[i] * 1664525u + 1013904223u;
    return CUDA_SUCCESS;
}

/* spin(uint64_t nanoseconds): keep the GPU busy. */
static CUresult spin(unsigned blocks, void **parameters)
{
    (void)blocks;
    uint64_t nanoseconds = *(uint64_t *)parameters[0];
    struct timespec left = {(time_t)(nanoseconds / 1000000000), (long)(nanoseconds % 1000000000)};
    while (nanosleep(&left, &left) < 0 && errno == EINTR)
        ;
    return CUDA_SUCCESS;
}

static const struct kernel KERNELS[] = {
    {"advance", advance}, {"spin", spin}, {"hash_pieces", hash_all}, {"finish_pieces", finish_all}};

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    (void)image;
    CUresult result = enter();
    if (result)
        return result;
    *module = (CUmodule)KERNELS;
    leave();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    (void)module;
    CUresult result = enter();
    if (result)
        return result;
    result = CUDA_ERROR_NOT_FOUND;
    for (size_t i = 0; i < sizeof KERNELS / sizeof *KERNELS; i++)
        if (strcmp(KERNELS[i].name, name) == 0) {
            *function = &KERNELS[i];
            result = CUDA_SUCCESS;
        }
    leave();
    return result;
}

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                               unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared,
                               CUstream stream, void **parameters, void **extra)
{
    (void)grid_y, (void)grid_z, (void)block_x, (void)block_y, (void)block_z, (void)shared, (void)stream, (void)extra;
    CUresult result = enter();
    if (result)
        return result;
    const char *switches = getenv("FAKE_CUDA_FAIL");
    struct switched what = switched(switches ? switches : "", "launch", ++launches, 0);
    act_before(what);
    if (what.action == ERROR)
        result = what.error;
    else
        result = current_device() < 0 ? CUDA_ERROR_INVALID_CONTEXT : function->run(grid_x, parameters);
    leave();
    return result;
}
