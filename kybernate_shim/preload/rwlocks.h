/* How the driver's threads wait for its own locks. */
#ifndef KYBERNATE_PRELOAD_RWLOCKS_H
#define KYBERNATE_PRELOAD_RWLOCKS_H

/* From now on, a thread that waits for such a lock in the library that contains `inside` waits our way. */
void watch_rwlocks_of(void *inside);

#endif
