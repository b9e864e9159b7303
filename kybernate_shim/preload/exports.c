/* Descriptors of memory that was exported: which there are, also for a child that does not have the control page. */
#include "exports.h"

#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SET_FLAGS = 2 /* F_SETFD */, CLOSE_ON_EXEC = 1 };
enum { EXPORTS_WAIT = 200, FORKS_WAIT = 2000 }; /* tries, at least 0.1 ms apart */

static _Atomic int32_t holder;          /* the thread that exports or forks, 0: none */
static int32_t descriptors[MAX_BLOCKS]; /* by block, and one more than the number: 0 is none */
static _Atomic uint32_t used;           /* entries that ever had one */

static bool hold(int tries)
{
    const struct timespec pause = {0, 100000};
    int32_t self = (int32_t)syscall(SYS_gettid);
    for (int i = 1;; i++) {
        int32_t none = 0;
        if (atomic_compare_exchange_strong(&holder, &none, self))
            return true;
        if (i >= tries)
            return false;
        nanosleep(&pause, NULL);
    }
}

bool begin_exports(bool stopped)
{
    static int32_t stuck; /* a thread that was waited for in vain, perhaps for as long as the driver is locked */
    bool hopeless = stopped || (stuck && atomic_load(&holder) == stuck);
    bool begun = hold(hopeless ? 1 : EXPORTS_WAIT);
    stuck = begun ? 0 : atomic_load(&holder);
    return begun;
}

void end_exports(bool begun)
{
    if (begun)
        atomic_store(&holder, 0);
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
    hold(FORKS_WAIT);
}

void exports_after_fork(void)
{
    int32_t self = (int32_t)syscall(SYS_gettid);
    atomic_compare_exchange_strong(&holder, &self, 0);
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
