/* The memory under a block's addresses: made, mapped, handed out and given up. */
#ifndef KYBERNATE_PRELOAD_PHYSICAL_H
#define KYBERNATE_PRELOAD_PHYSICAL_H

#include "blocks.h"

/* Make memory that can be exported, and map it where the block is mapped; nothing is left behind by a failure. */
CUresult put_memory(struct block *block);

/* Map existing memory at the block's addresses for all devices that may use it. */
CUresult map_memory(const struct block *block, CUhandle handle);

/* Let all devices that may use the block use what is mapped at its addresses. */
CUresult open_to_devices(const struct block *block);

/* Unmap and release it; the addresses stay reserved. After a failure it is there, and mapped, as it was. */
CUresult drop_memory(struct block *block);

#endif
