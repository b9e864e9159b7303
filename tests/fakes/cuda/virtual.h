/* Memory that a program maps by itself, and its share in a checkpoint. A test double: see abi.h. */
#ifndef FAKE_CUDA_VIRTUAL_H
#define FAKE_CUDA_VIRTUAL_H

#include "pointers.h"

/* Tell whether mappings that may be used cover [address, address + size), also while their bytes are on the host; takes
 * no lock. `found` receives the first of them; may be NULL. */
bool is_mapped(CUdeviceptr address, size_t size, struct found *found);

/* The host address of [address, address + size) where it is mapped and may be used, or NULL. */
char *translate_virtual(CUdeviceptr address, size_t size);

/* Move all of it to `data` and off the GPUs, or back; false: the machine has not enough. */
void virtual_to_host(char *data);
bool virtual_to_gpus(char *data);

/* Whether some of it was made by another process, and is mapped here: the real driver does not restore that. */
bool maps_imported_memory(void);

#endif
