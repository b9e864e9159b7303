/* The turn of the container's seat: before it, a program does not begin with the GPU. */
#ifndef KYBERNATE_PRELOAD_TURN_H
#define KYBERNATE_PRELOAD_TURN_H

#include "abi.h"

/* Return as soon as it is the turn of the container's seat, immediately where it has none. CUDA_ERROR_SYSTEM_NOT_READY:
 * the node's agent was away for longer than the node's configuration waits for it. */
CUresult await_turn(void);

#endif
