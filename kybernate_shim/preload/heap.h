/* The locks of the program's heap, which the driver and this library need while the program's threads are stopped. */
#ifndef KYBERNATE_PRELOAD_HEAP_H
#define KYBERNATE_PRELOAD_HEAP_H

/* Return when each of them was free for a moment; while a thread that has one is stopped, that is never. */
void wait_for_heap(void);

#endif
