/* What stands at the addresses of memory that is away.
 *
 * The driver looks up the device pointers of a copy, and of a query, before it waits for the lock of a checkpoint: at
 * addresses with nothing behind them such a call fails, in a program that has done nothing wrong. With anything there
 * it waits, until the bytes are back. So a few small allocations are mapped there again and again. No thread
 * reads or writes them: while the program's threads can run, the driver is locked. Measured with driver 580.159.04 on
 * an H200: for 40 GiB in pieces of 64 MiB, 17 ms to map them and 15 ms to unmap them; the driver's own checkpoint and
 * restore take no longer for them, as they do for larger pieces, or for more of them.
 */
#ifndef KYBERNATE_PRELOAD_PLACEHOLDERS_H
#define KYBERNATE_PRELOAD_PLACEHOLDERS_H

#include "blocks.h"

/* Map placeholders over the whole block, at whose addresses there is nothing; a block that is mapped nowhere, or has
 * them, needs none. After a failure there is nothing. */
CUresult cover(struct block *block);

/* The same for all blocks that are AWAY. */
CUresult cover_away(struct control *control);

/* Unmap them; the last block of a device that does so gives their memory back. */
CUresult uncover(struct block *block);

/* The same for all blocks of a device, where their memory is needed for something else. */
CUresult uncover_device(struct control *control, CUdevice device);

#endif
