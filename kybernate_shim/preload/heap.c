/* The locks of the program's heap.
 *
 * The driver allocates with malloc(3) and frees what other threads have allocated, so it needs the lock of each part of
 * the heap. A thread may be stopped just when it has one. Where no lock is held once all threads are stopped, none will
 * be until they resume, so that is found out before anything is done that cannot be undone without the driver.
 */
#include "heap.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>

#include "versions.h"

enum { LARGE = 64 << 10 }; /* not from a thread's own cache, and not from mmap(2) either */

struct counts { /* glibc's struct mallinfo */
    int all[10];
};

void wait_for_heap(void)
{
    char *volatile memory = malloc(LARGE); /* of whatever allocator the program has */
    free(memory);
    struct counts (*count)(void);
    *(void **)&count = dlvsym(RTLD_DEFAULT, "mallinfo", OLDEST_GLIBC); /* needs the lock of the loader */
    if (count)
        count(); /* of glibc's: it locks all arenas, one after the other */
}
