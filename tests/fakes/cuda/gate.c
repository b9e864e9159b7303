/* The gate that every call of the driver passes: a locked process is one whose restore thread has shut it.
 * A test double: see abi.h.
 *
 * As in the real driver, it is the C library's lock of many readers and one writer, with its habits: a reader that
 * waits when the gate opens has passed it, even where its thread is stopped and never learns of it, and the gate cannot
 * be shut again before that thread has gone on and left.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "process.h"
#include "switches.h"

enum { LARGE = 16 << 10 }; /* what no thread's own cache has */

static pthread_rwlock_t gate = PTHREAD_RWLOCK_INITIALIZER;

void use_heap(void)
{
    char *volatile memory = malloc(LARGE);
    free(memory);
}

CUresult enter_function(const char *name)
{
    if (!process.started)
        return CUDA_ERROR_NOT_INITIALIZED;
    pthread_rwlock_rdlock(&gate);
    use_heap();
    struct switched what = switched_function(name);
    act_before(what);
    if (what.action == ERROR)
        leave();
    return what.action == ERROR ? what.error : CUDA_SUCCESS;
}

void leave(void)
{
    pthread_rwlock_unlock(&gate);
}

bool shut_gate(uint32_t timeout_ms)
{
    struct timespec until;
    if (!timeout_ms)
        return pthread_rwlock_wrlock(&gate) == 0;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += timeout_ms / 1000;
    until.tv_nsec += timeout_ms % 1000 * 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    return pthread_rwlock_timedwrlock(&gate, &until) == 0;
}

void open_gate(void)
{
    pthread_rwlock_unlock(&gate);
}
