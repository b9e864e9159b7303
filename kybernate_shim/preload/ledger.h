/* What the processes of a container have allocated, in memory that they share. */
#ifndef KYBERNATE_PRELOAD_LEDGER_H
#define KYBERNATE_PRELOAD_LEDGER_H

#include <stdbool.h>

#include "abi.h"

/* The bytes that are declared for each GPU, 0: none are. */
size_t declared_bytes(void);

/* Add to what this process has on a device; false, and nothing is added, where all processes would have more than is
 * declared. */
bool ledger_add(CUdevice device, size_t size);
void ledger_remove(CUdevice device, size_t size);

/* What all processes of the container have on a device. */
size_t ledger_sum(CUdevice device);

void ledger_in_child(void); /* of fork(2): it has nothing */

#endif
