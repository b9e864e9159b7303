/* The program's allocations, and their share in a checkpoint. A test double: see abi.h. */
#ifndef FAKE_CUDA_MEMORY_H
#define FAKE_CUDA_MEMORY_H

#include "pointers.h"

/* Tell whether [address, address + size) lies in an allocation; takes no lock. `found` receives which; may be NULL. */
bool is_allocated(CUdeviceptr address, size_t size, struct found *found);

/* The host address of [address, address + size) in an allocation, or NULL. */
char *translate_allocated(CUdeviceptr address, size_t size);

/* Bytes of all of them, contexts included, and added per GPU to `bytes`, for the GPUs that `moves` leads to. */
uint64_t allocated_bytes(uint64_t bytes[MAX_GPUS], const int moves[MAX_GPUS]);

/* Move all of it to `data` and off the GPUs, or back; these return the end of what they have used of `data`. NULL: the
 * machine has not enough. */
char *allocated_to_host(char *data);
char *allocated_to_gpus(char *data);

/* True once the program asked for managed memory, which the driver checkpoints and then cannot restore. */
bool has_managed_memory(void);

CUresult charge_context(int device);
void discharge_context(int device);

#endif
