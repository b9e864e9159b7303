/* Runs the arena's own kernels, the very lines that a GPU would run: each thread of them is a turn of a loop here.
 * A test double: see abi.h.
 */
#include "hashes.h"

#include <stdlib.h>

#include "pointers.h"

typedef struct {
    unsigned x, y, z, w;
} uint4;

static __thread struct {
    unsigned x;
} blockIdx, threadIdx;

#define KERNEL static
#define DEVICE static inline
#define UNROLL
#define __umul64hi(a, b) ((wide)((unsigned __int128)(a) * (b) >> 64))
#define __ldcs(pointer) (*(pointer))
#define atomicAdd(pointer, value) (*(pointer) += (value))

#include "../../../kybernate_shim/cuda_worker/hashing.cu"

/* The host's address of device memory that a parameter points to. */
#define AT(parameter, bytes) translate(*(CUdeviceptr *)(parameter), bytes)

CUresult hash_all(unsigned blocks, void **parameters)
{
    const wide *addresses = AT(parameters[0], blocks * sizeof *addresses);
    wide size = *(wide *)parameters[1];
    const wide *spread = AT(parameters[2], LANES * THREADS * sizeof *spread);
    struct sums *sums = AT(parameters[3], blocks * sizeof *sums);
    wide *here = calloc(blocks, sizeof *here);
    CUresult result = addresses && spread && sums && here ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
    for (unsigned i = 0; i < blocks && !result; i++) {
        here[i] = (wide)(uintptr_t)translate(addresses[i], size);
        if (!here[i])
            result = CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    for (blockIdx.x = 0; blockIdx.x < blocks && !result; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < THREADS; threadIdx.x++)
            hash_pieces(here, size, spread, sums, *(struct keys *)parameters[4]);
    free(here);
    return result;
}

CUresult finish_all(unsigned blocks, void **parameters)
{
    word count = *(word *)parameters[1];
    const struct sums *sums = AT(parameters[0], count * sizeof *sums);
    word *hashes = AT(parameters[2], count * LANES * sizeof *hashes), *any = AT(parameters[3], count * sizeof *any);
    if (!sums || !hashes || !any || blocks * THREADS < count)
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < THREADS; threadIdx.x++)
            finish_pieces(sums, count, hashes, any);
    return CUDA_SUCCESS;
}
