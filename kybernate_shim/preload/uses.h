/* Whether the program uses the GPU, told to the node while it is suspended. */
#ifndef KYBERNATE_PRELOAD_USES_H
#define KYBERNATE_PRELOAD_USES_H

#include "abi.h"
#include "control.h"

typedef void function(void); /* only addresses are passed on here */

/* Note a call that counts as use, if the node has asked for that. Costs a look at a word. */
void note_use(void);

/* The page in which uses are noted; NULL in a child of fork(2). */
void note_uses_in(struct control *control);

/* Learn where the driver's functions are, which `lookup` finds by their symbols. */
void find_used(function *(*lookup)(void *library, const char *symbol), void *library);

/* What the program calls in place of a function of the driver's, by its symbol or its address; NULL where that does not
 * count as use, or has an answer of ours. */
function *counted_symbol(const char *symbol);
function *counted_function(const void *address);

#endif
