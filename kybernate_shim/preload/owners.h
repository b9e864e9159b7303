/* What the driver does to a context's allocations, and does not do to memory that belongs to no context. */
#ifndef KYBERNATE_PRELOAD_OWNERS_H
#define KYBERNATE_PRELOAD_OWNERS_H

#include "abi.h"

/* Bit mask of the devices that may read and write what is allocated on `device`: itself, and those that a context has
 * enabled for peer access. */
uint64_t devices_that_see(CUdevice device);

/* Learn whether a context that allocates is the primary one of its device, so that its end is noticed. */
void note_primary(CUcontext context, CUdevice device);

#endif
