/* Memory that a program makes by itself, and what its calls have in common with those on addresses.
 * A test double: see abi.h.
 */
#ifndef FAKE_CUDA_PHYSICAL_H
#define FAKE_CUDA_PHYSICAL_H

#include "process.h"

enum { MOST_VIRTUAL = 4096, VIRTUAL_GRAIN = 2 << 20, READ_WRITE = 3 };

typedef struct {
    int type, id;
} CUmemLocation;

typedef struct {
    int type, handle_types;
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

struct memory {
    int references; /* handles and mappings; 0: this entry is free */
    int fd;         /* -1 while it is on the host */
    int device;
    int handle_types;
    bool imported;
    uint64_t size;
};

/* Enter a call that can be made to fail by the switch "vmm"; the lock of all this is held then. */
CUresult begin_virtual_function(const char *name);
#define begin_virtual() begin_virtual_function(__func__)
CUresult end_virtual(CUresult result);

/* NULL: there is none. */
struct memory *by_handle(uint64_t handle);
uint64_t handle_of(const struct memory *memory);

/* Give up a handle or a mapping. */
void drop_reference(struct memory *memory);

/* Bytes that this process has made, in all, and added per GPU to `bytes`, for the GPUs that `moves` leads to. */
uint64_t physical_bytes(uint64_t bytes[MAX_GPUS], const int moves[MAX_GPUS]);

/* Move the bytes of all memory that was made here to `data`, each once however often it is mapped, or back; these
 * return the end of what they have used of `data`. NULL: the machine has not enough. */
char *physical_to_host(char *data);
char *physical_to_gpus(char *data);

#endif
