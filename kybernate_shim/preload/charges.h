/* The container's declared VRAM: what its processes allocate on a GPU is counted, and refused where it would be more. */
#ifndef KYBERNATE_PRELOAD_CHARGES_H
#define KYBERNATE_PRELOAD_CHARGES_H

#include <stdbool.h>

#include "abi.h"

/* What a charge is found by when its memory is given up. */
enum charged { AT_ADDRESS = 1, BY_HANDLE, BY_ARRAY };

/* An allocation that has begun; not `counted` where no limit is declared, or where the driver refuses it. */
struct charge {
    size_t size;
    CUdevice device;
    bool counted;
    CUcontext context; /* whose end ends the memory; NULL for none */
};

/* Count `size` bytes on the current device, or on one that is named, before the driver is asked for them; false where
 * they would exceed what is declared. Whatever the result, `end_charge` is called next. */
bool begin_charge(struct charge *charge, size_t size);
bool begin_charge_on(struct charge *charge, size_t size, CUdevice device);
CUresult end_charge(const struct charge *charge, CUresult result, enum charged by, uint64_t name);

/* What was given up, or is about to be: by its name, or with a context. */
void refund(enum charged by, uint64_t name);
void refund_context(CUcontext context);

/* Memory with a handle is there as long as a reference or a mapping of it is. */
void charge_mapped(CUhandle handle, CUdeviceptr address, size_t size);
void charge_unmapped(CUdeviceptr address, size_t size);
void charge_retained(CUhandle handle, CUdeviceptr address);
void charge_released(CUhandle handle);

#endif
