/* Ranges of addresses for memory that we make. */
#ifndef KYBERNATE_PRELOAD_ADDRESSES_H
#define KYBERNATE_PRELOAD_ADDRESSES_H

#include "abi.h"

/* Reserve addresses, those of freed memory of the same size first. */
CUresult take_addresses(CUdeviceptr *address, size_t size);

/* Keep addresses, at which there is nothing any more, for the next allocation of the same size. */
void keep_addresses(CUdeviceptr address, size_t size);

#endif
