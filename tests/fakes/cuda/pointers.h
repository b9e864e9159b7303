/* What device pointers name, and when the driver looks at them. A test double: see abi.h.
 *
 * The driver looks at the pointers of a copy before it waits for its lock: while the process is locked or checkpointed,
 * it answers INVALID_VALUE immediately where nothing is mapped, and waits where something is. cuMemset and
 * cuMemGetAddressRange wait first. cuPointerGetAttribute never waits. Measured with driver 580.159 on an H200 for
 * cuMemcpyHtoD, DtoH and DtoD, and their Async forms. What was not measured is as strict as those here.
 */
#ifndef FAKE_CUDA_POINTERS_H
#define FAKE_CUDA_POINTERS_H

#include "process.h"

/* Where device addresses lie: no host addresses, so that a program that touches one crashes, as on a real GPU. */
#define ALLOCATED_BASE ((CUdeviceptr)0x6fca00000000)
#define VIRTUAL_BASE ((CUdeviceptr)0x6fdb00000000)

/* What an address is part of: an allocation or a mapping. */
struct found {
    CUdeviceptr start;
    uint64_t size;
    int device;
};

/* Addresses from ALLOCATED_BASE on; all others are the host's. */
bool is_device_address(CUdeviceptr address);

/* Tell whether the GPU could use all of [address, address + size), also while its bytes are on the host. Takes no
 * lock, since its caller has not passed the gate: a thread that is stopped here must hold nothing. `found` may be
 * NULL. */
bool names_memory(CUdeviceptr address, size_t size, struct found *found);

/* To be called around each change of what there is, inside the gate. */
void begin_change(void);
void end_change(void);

/* The host address of [address, address + size) of device memory, or NULL; inside the gate. */
void *translate(CUdeviceptr address, size_t size);

/* Pass the gate as the driver's function `name` with a pointer: INVALID_VALUE, immediately, where it names nothing; leave()
 * is owed on CUDA_SUCCESS. */
CUresult enter_with(const char *name, CUdeviceptr address, size_t size);

#endif
