/* The thread that the node's CUDA helper talks to: it does in this process what only this process can.
 *
 * Usually, the program's threads are stopped during that, or wait for the driver, at any point of their code. So
 * nothing here may wait for them: the table's lock is only tried, and memory that a thread was about to change has its
 * own answer.
 */
#include "answer.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "exports.h"
#include "heap.h"
#include "physical.h"
#include "placeholders.h"
#include "versions.h"

enum { FUTEX_WAIT = 0, FUTEX_WAKE = 1 }; /* not the private ones: the helper is another process */

static bool takeable(const struct block *block)
{
    return block->state == HERE && !(block->flags & PRIVATE);
}

static uint32_t end_of_range(const struct control *control)
{
    uint32_t used = control->used, first = control->first, count = control->count;
    return first > used || count > used - first ? used : first + count;
}

static bool anybody_busy(const struct control *control)
{
    for (uint32_t i = 0; i < control->used; i++)
        if (control->blocks[i].state == BUSY)
            return true;
    return false;
}

static int shut(const struct control *control)
{
    shut_blocks();
    return anybody_busy(control) || fork_in_progress() ? -EBUSY : CUDA_SUCCESS;
}

static int share_range(struct control *control)
{
    for (uint32_t i = control->first; i < end_of_range(control); i++) {
        struct block *block = &control->blocks[i];
        if (!takeable(block))
            continue;
        CUresult result = export_memory(control, block);
        if (result)
            return result;
        block->state = SHARED;
    }
    return CUDA_SUCCESS;
}

/* The program may be running, so a child that is forked meanwhile would have what is exported. */
static int share(struct control *control)
{
    open_blocks(); /* by now the threads are stopped, or are to resume */
    if (anybody_busy(control) || !begin_exports())
        return -EBUSY;
    int result = share_range(control);
    end_exports(true);
    return result;
}

static int close_all(struct control *control)
{
    for (uint32_t i = 0; i < control->used; i++)
        close_export(control, &control->blocks[i]);
    return CUDA_SUCCESS;
}

static int leave(struct control *control, uint32_t from, uint32_t begin, uint32_t end)
{
    int first = CUDA_SUCCESS;
    for (uint32_t i = begin; i < end; i++) {
        struct block *block = &control->blocks[i];
        if (block->state != from)
            continue;
        CUresult result = drop_memory(block);
        if (result == CUDA_SUCCESS) {
            block->state = AWAY;
            result = cover(block);
        }
        if (first == CUDA_SUCCESS)
            first = result;
    }
    return first;
}

static int stay(struct control *control, uint32_t from)
{
    for (uint32_t i = 0; i < control->used; i++)
        if (control->blocks[i].state == from)
            control->blocks[i].state = HERE;
    return CUDA_SUCCESS;
}

static int discard(struct control *control)
{
    int first = leave(control, REBUILT, 0, control->used);
    CUresult result = cover_away(control);
    return first ? first : result;
}

/* The placeholders need no more than what they stand in for, so a GPU that had room for the program has it again. */
static CUresult put_back(struct control *control, struct block *block)
{
    CUresult result = uncover(block);
    if (result)
        return result;
    result = put_memory(block);
    if (result != CUDA_ERROR_OUT_OF_MEMORY || uncover_device(control, block->device))
        return result;
    return put_memory(block);
}

static int rebuild(struct control *control)
{
    for (uint32_t i = control->first; i < end_of_range(control); i++) {
        struct block *block = &control->blocks[i];
        if (block->state != AWAY)
            continue;
        CUresult result = put_back(control, block);
        if (result) {
            cover_away(control);
            return result;
        }
        block->state = REBUILT;
        result = export_memory(control, block);
        if (result)
            return result;
    }
    return CUDA_SUCCESS;
}

/* The threads are stopped: a fork that does not end has made its child already, or makes it later. */
static int without_forks(int (*work)(struct control *), struct control *control)
{
    bool begun = begin_exports();
    int result = work(control);
    end_exports(begun);
    return result;
}

static int perform(struct control *control)
{
    switch (control->verb) {
    case SHARE:
        return share(control);
    case CLOSE:
        return without_forks(close_all, control);
    case RELEASE:
        return leave(control, SHARED, 0, control->used);
    case FORGET:
        return stay(control, SHARED);
    case REBUILD:
        return without_forks(rebuild, control);
    case COMMIT:
        return stay(control, REBUILT);
    case DISCARD:
        return discard(control);
    case LET_GO:
        return leave(control, SHARED, control->first, end_of_range(control));
    case SHUT:
        return shut(control);
    default:
        return -EINVAL;
    }
}

static void *answer(void *argument)
{
    struct control *control = argument;
    prctl(PR_SET_NAME, CONTROL_NAME);
    control->pid = (int32_t)getpid();
    control->tid = (int32_t)syscall(SYS_gettid);
    *(volatile uint32_t *)&control->magic = CONTROL_MAGIC;
    for (;;) {
        uint32_t done = atomic_load(&control->answered);
        if (atomic_load(&control->asked) == done) {
            syscall(SYS_futex, &control->asked, FUTEX_WAIT, done, NULL, NULL, 0);
            continue;
        }
        if (control->verb == PROBE) {
            wait_for_heap(); /* without the table's lock, for which a thread that has the heap's may wait */
            control->result = CUDA_SUCCESS;
        } else if (try_lock_blocks()) {
            control->result = perform(control);
            notice_away(control);
            unlock_blocks();
        } else {
            control->result = -EBUSY;
        }
        atomic_store(&control->answered, atomic_load(&control->asked));
        syscall(SYS_futex, &control->answered, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    }
    return NULL;
}

bool start_answering(struct control *control)
{
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &before); /* the program's signals are not this thread's; of one thread on Linux */
    int failed = pthread_create(&thread, NULL, answer, control);
    sigprocmask(SIG_SETMASK, &before, NULL);
    if (failed)
        return false;
    pthread_detach(thread);
    while (*(volatile uint32_t *)&control->magic != CONTROL_MAGIC)
        usleep(100);
    return true;
}
