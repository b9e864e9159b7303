/* Descriptors of memory that was exported: which there are, also for a child that does not have the control page. */
#include "exports.h"

#include "blocks.h"

#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SET_FLAGS = 2 /* F_SETFD */, CLOSE_ON_EXEC = 1 };
enum { EXPORTS_WAIT = 200, FORKS_WAIT = 2000 }; /* tries, at least 0.1 ms apart */

static const struct timespec PAUSE = {0, 100000};

static _Atomic int32_t holder;          /* the thread that exports or forks, 0: none */
static _Atomic uint32_t turns;          /* how often one has ended */
static int32_t descriptors[MAX_BLOCKS]; /* by block, and one more than the number: 0 is none */
static _Atomic uint32_t used;           /* entries that ever had one */

static bool hold(void)
{
    int32_t none = 0;
    return atomic_compare_exchange_strong(&holder, &none, (int32_t)syscall(SYS_gettid));
}

static void let_go(void)
{
    if (atomic_load(&holder) != (int32_t)syscall(SYS_gettid))
        return; /* a fork that has waited in vain */
    atomic_fetch_add(&turns, 1); /* before the next one can begin */
    atomic_store(&holder, 0);
}

bool begin_exports(void)
{
    static uint32_t hopeless = UINT32_MAX; /* the turn that was waited for in vain: its thread does not run */
    for (int tries = 0; !hold(); tries++) {
        uint32_t seen = atomic_load(&turns);
        if (tries >= EXPORTS_WAIT)
            hopeless = seen;
        if (hopeless == seen)
            return false;
        nanosleep(&PAUSE, NULL);
    }
    return true;
}

void end_exports(bool begun)
{
    if (begun)
        let_go();
}

bool fork_in_progress(void)
{
    return atomic_load(&holder) != 0;
}

CUresult export_memory(const struct control *control, struct block *block)
{
    uint32_t place = (uint32_t)(block - control->blocks);
    int fd = -1;
    CUresult result = driver()->share(&fd, block->handle, AS_DESCRIPTOR, 0);
    if (result)
        fd = -1;
    else
        syscall(SYS_fcntl, fd, SET_FLAGS, CLOSE_ON_EXEC);
    descriptors[place] = fd + 1;
    if (place >= atomic_load(&used))
        atomic_store(&used, place + 1);
    block->fd = fd;
    return result;
}

void close_export(const struct control *control, struct block *block)
{
    int32_t fd = block->fd;
    if (fd < 0)
        return;
    block->fd = -1;
    descriptors[block - control->blocks] = 0;
    close(fd);
}

void exports_before_fork(void)
{
    for (int tries = 0; tries < FORKS_WAIT; tries++) {
        if (hold()) {
            if (!blocks_shut()) /* checked last: a thread that shuts them checks for a fork afterwards */
                return;
            let_go();
        }
        nanosleep(&PAUSE, NULL);
    }
}

void exports_after_fork(void)
{
    let_go();
}

void exports_in_child(void)
{
    for (uint32_t i = 0; i < used; i++)
        if (descriptors[i]) {
            close(descriptors[i] - 1);
            descriptors[i] = 0;
        }
    atomic_store(&holder, 0);
}
