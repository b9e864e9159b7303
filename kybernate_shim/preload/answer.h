/* The thread that the node's CUDA helper talks to. */
#ifndef KYBERNATE_PRELOAD_ANSWER_H
#define KYBERNATE_PRELOAD_ANSWER_H

#include <stdbool.h>

#include "control.h"

/* Start it, and return when it can be asked; false where threads cannot be made. */
bool start_answering(struct control *control);

#endif
