/* Descriptors of memory that was exported, which the helper fetches.
 *
 * A child of fork(2) must get none of them: it would keep the memory on the GPU after the program has left it, and CRIU
 * dumps no such descriptor. So a fork waits until an export has ended, and the child closes the descriptors that it
 * has got. They are also closed by execve(2).
 */
#ifndef KYBERNATE_PRELOAD_EXPORTS_H
#define KYBERNATE_PRELOAD_EXPORTS_H

#include <stdbool.h>

#include "control.h"
#include "driver.h"

/* Let forks wait between the two, for a moment. False where one does not end in time: then a child that threads make
 * meanwhile may get what is exported. */
bool begin_exports(void);
void end_exports(bool begun);

/* Whether a thread is forking right now. */
bool fork_in_progress(void);

CUresult export_memory(const struct control *control, struct block *block);

/* Nothing happens to a block that has no descriptor. */
void close_export(const struct control *control, struct block *block);

/* What pthread_atfork(3) is given. A fork waits at the gate of the blocks, too, but not for as long as one is away. */
void exports_before_fork(void);
void exports_after_fork(void);
void exports_in_child(void);

#endif
