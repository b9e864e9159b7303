/* The table of memory that was taken over. */
#ifndef KYBERNATE_PRELOAD_BLOCKS_H
#define KYBERNATE_PRELOAD_BLOCKS_H

#include <stdbool.h>

#include "abi.h"
#include "control.h"

/* The lock of the table is held for a few instructions, and never across a call of the driver: the helper stops the
 * program's threads wherever they are, and then asks the control thread, which needs it, too. A thread that works on a
 * block meanwhile marks it BUSY. */
void lock_blocks(void);
bool try_lock_blocks(void); /* for a while */
void unlock_blocks(void);

/* The gate, at which threads wait before they mark a block BUSY; the lock must be held.
 *
 * The helper shuts it before it has the driver lock the process: a thread that is caught between two calls of an
 * allocation has to be resumed, and caught again. It stays shut until SHARE, or for a second, whatever becomes of the
 * helper. And it is shut as long as any block is AWAY or REBUILT: a thread that ran then would record in the table
 * the state of memory that is not there. It would get no further than the driver's lock anyway. */
void shut_blocks(void);
void open_blocks(void);
bool blocks_shut(void); /* for the helper, and not because a block is away; without the lock */
void notice_away(const struct control *page); /* after each change of states */

/* Make the table and the thread that answers for it, once; false where that cannot be, then nothing is taken over. */
bool blocks_ready(void);

/* NULL before the first block, and in a child of fork(2). */
struct control *blocks_control(void);

/* Take an unused entry, which is BUSY then; NULL if there is none. */
struct block *claim_block(void);

/* Find a block by an address in it, or by the program's handle, and mark it BUSY; NULL if there is none, or
 * another thread has it. The state that it had is in `before`, which give_block puts back. */
struct block *take_block_at(CUdeviceptr address, uint32_t *before);
struct block *take_block_of(CUhandle handle, uint32_t *before);
/* The same by handle_of a block that the program has no handle of. */
struct block *take_block_named(CUhandle name, uint32_t *before);
void give_block(struct block *block, uint32_t state);

/* Mark all blocks BUSY for which `wanted` is true, as PASSING, and return them one by one; NULL after the last. */
typedef bool choice(const struct block *block, uint64_t low, uint64_t high);
void mark_passing(choice *wanted, uint64_t low, uint64_t high);
struct block *next_passing(void);

/* What the program sees as the handle of memory that it has made itself; the driver's may change under it. */
CUhandle handle_of(const struct block *block);
bool is_ours(CUhandle handle);

#endif
