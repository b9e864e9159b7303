/* Memory that a program maps by itself, and its share in a checkpoint. A test double: see abi.h. */
#ifndef FAKE_CUDA_VIRTUAL_H
#define FAKE_CUDA_VIRTUAL_H

#include "process.h"

/* The host address of [address, address + size) where it is mapped and may be used, or NULL. */
char *translate_virtual(CUdeviceptr address, size_t size);

/* Bytes that this process has made, in all, and added per card to `bytes`, for the cards that `moves` leads to. */
uint64_t virtual_bytes(uint64_t bytes[MAX_CARDS], const int moves[MAX_CARDS]);

/* Move all of it to `data` and off the cards, or back; these return the end of what they have used of `data`. */
char *virtual_to_host(char *data);
char *virtual_to_cards(char *data);

/* Whether some of it was made by another process, and is mapped here: the real driver does not restore that. */
bool maps_imported_memory(void);

/* Change this process's account: memory.c. */
CUresult charge_bytes(int device, uint64_t size);
void discharge_bytes(int device, uint64_t size);

#endif
