/* Descriptors of memory that was exported, which the helper fetches.
 *
 * A child of fork(2) must get none of them: it would keep the memory on the GPU after the program has left it, and no
 * dump takes such a descriptor. So a fork waits for an export that is under way, and the child closes those that
 * there are. A program that is executed gets none, either.
 */
#ifndef KYBERNATE_PRELOAD_EXPORTS_H
#define KYBERNATE_PRELOAD_EXPORTS_H

#include <stdbool.h>

#include "control.h"
#include "driver.h"

/* Keep forks away between the two, or let them wait for a moment: false where one did not end in time, because its
 * thread is stopped; then a child may still get what is exported meanwhile. */
bool begin_exports(void);
void end_exports(bool begun);

CUresult export_memory(const struct control *control, struct block *block);

/* Nothing happens to a block that has no descriptor. */
void close_export(const struct control *control, struct block *block);

/* What pthread_atfork(3) is given. */
void exports_before_fork(void);
void exports_after_fork(void);
void exports_in_child(void);

#endif
