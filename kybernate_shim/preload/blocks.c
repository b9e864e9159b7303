/* The table of memory that was taken over, in the mapping that the helper finds. */
#include "blocks.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "answer.h"
#include "exports.h"
#include "uses.h"
#include "versions.h"

enum { SEALABLE = 2 /* MFD_ALLOW_SEALING */, CLOSE_ON_EXEC = 1, ADD_SEALS = 1033, SHRINK = 2, GROW = 4 };
enum { TRIES = 2000 }; /* of a lock that a stopped thread may hold, 0.1 ms apart */
enum { WAIT = 128, WAKE = 129 }; /* FUTEX_WAIT_PRIVATE and FUTEX_WAKE_PRIVATE */
enum { SECOND = 1000000000 };

static const uint64_t TAG = 0x6b79000000000000; /* of our handles; the driver's have nothing so high up */

static struct control *control;
static pthread_once_t made = PTHREAD_ONCE_INIT;
static atomic_flag locked = ATOMIC_FLAG_INIT;
static uint32_t generations;

/* The gate. */
static _Atomic uint64_t shut_until; /* of CLOCK_MONOTONIC, in nanoseconds; 0: not shut */
static bool away;                   /* some block is AWAY or REBUILT */
static _Atomic uint32_t openings;   /* a futex(2) */

/* A spinning lock, since a mutex may not be used by a child of fork(2) that another thread held it in. */
void lock_blocks(void)
{
    while (atomic_flag_test_and_set_explicit(&locked, memory_order_acquire))
        sched_yield();
}

bool try_lock_blocks(void)
{
    const struct timespec pause = {0, 100000};
    for (int i = 0; i < TRIES; i++) {
        if (!atomic_flag_test_and_set_explicit(&locked, memory_order_acquire))
            return true;
        nanosleep(&pause, NULL);
    }
    return false;
}

void unlock_blocks(void)
{
    atomic_flag_clear_explicit(&locked, memory_order_release);
}

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * SECOND + (uint64_t)time.tv_nsec;
}

/* How long the helper keeps the gate shut. */
static uint64_t shut_by_helper(void)
{
    uint64_t until = atomic_load(&shut_until), left = until ? until - now() : 0;
    return left > SECOND ? 0 : left; /* it is over, or the clock was set back, as by a restore on another node */
}

/* How long to wait at the gate before the next look, 0: it is open. */
static uint64_t shut_for(void)
{
    uint64_t left = shut_by_helper();
    if (!left)
        shut_until = 0;
    return away ? SECOND : left;
}

static void let_pass(void)
{
    atomic_fetch_add(&openings, 1);
    syscall(SYS_futex, &openings, WAKE, INT_MAX, NULL, NULL, 0);
}

void shut_blocks(void)
{
    if (!shut_until || !shut_for())
        shut_until = now() + SECOND;
}

bool blocks_shut(void)
{
    return shut_by_helper() != 0;
}

void open_blocks(void)
{
    shut_until = 0;
    let_pass();
}

void notice_away(const struct control *page)
{
    bool before = away;
    away = false;
    for (uint32_t i = 0; i < page->used && !away; i++)
        away = page->blocks[i].state == AWAY || page->blocks[i].state == REBUILT;
    if (before && !away)
        let_pass();
}

/* Lock the table to mark a block BUSY, as soon as the gate is open. Cancelling a thread does not end it here, where it
 * may have `passing`: a bare system call is no point for that. */
static void lock_open_blocks(void)
{
    lock_blocks();
    for (uint64_t left; (left = shut_for());) {
        uint32_t seen = atomic_load(&openings);
        const struct timespec most = {(time_t)(left / SECOND), (long)(left % SECOND)};
        unlock_blocks();
        syscall(SYS_futex, &openings, WAIT, seen, &most, NULL, 0);
        lock_blocks();
    }
}

/* CUDA cannot be used in a child of fork(2), so nothing is taken over there, and nothing is there to be taken. */
static void after_fork(void)
{
    exports_in_child();
    control = NULL;
    note_uses_in(NULL);
    shut_until = 0;
    away = false;
    unlock_blocks();
}

static void make(void)
{
    int fd = (int)syscall(SYS_memfd_create, CONTROL_NAME, SEALABLE | CLOSE_ON_EXEC);
    if (fd < 0)
        return;
    struct control *found = MAP_FAILED;
    if (ftruncate(fd, sizeof *found) == 0 && syscall(SYS_fcntl, fd, ADD_SEALS, SHRINK | GROW) == 0)
        found = mmap(NULL, sizeof *found, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (found == MAP_FAILED)
        return;
    madvise(found, sizeof *found, MADV_DONTFORK);
    found->version = CONTROL_VERSION;
    if (!start_answering(found)) {
        munmap(found, sizeof *found);
        return;
    }
    pthread_atfork(exports_before_fork, exports_after_fork, after_fork);
    control = found;
    note_uses_in(found);
}

bool blocks_ready(void)
{
    pthread_once(&made, make);
    return control != NULL;
}

struct control *blocks_control(void)
{
    return control;
}

struct block *claim_block(void)
{
    struct block *found = NULL;
    lock_open_blocks();
    uint32_t used = control->used;
    for (uint32_t i = 0; i < used && !found; i++)
        if (control->blocks[i].state == UNUSED)
            found = &control->blocks[i];
    if (!found && used < MAX_BLOCKS) {
        found = &control->blocks[used];
        control->used = used + 1;
    }
    if (found) {
        memset(found, 0, sizeof *found);
        found->state = BUSY;
        found->fd = -1;
        found->generation = ++generations & 0xffffff;
    }
    unlock_blocks();
    return found;
}

static struct block *mark_busy(struct block *block, uint32_t *before)
{
    if (!block || block->state == UNUSED || block->state == BUSY)
        return NULL;
    *before = block->state;
    block->state = BUSY;
    return block;
}

struct block *take_block_at(CUdeviceptr address, uint32_t *before)
{
    struct block *found = NULL;
    if (!control || !address)
        return NULL;
    lock_open_blocks();
    uint32_t used = control->used;
    for (uint32_t i = 0; i < used && !found; i++) {
        struct block *it = &control->blocks[i];
        if (it->state != UNUSED && it->address && address >= it->address && address - it->address < it->size)
            found = it;
    }
    found = mark_busy(found, before);
    unlock_blocks();
    return found;
}

static struct block *take(CUhandle name, uint32_t *before, bool by_program)
{
    struct block *found = NULL;
    if (!control || !is_ours(name))
        return NULL;
    lock_open_blocks();
    struct block *it = &control->blocks[name & (MAX_BLOCKS - 1)];
    if (it->state != UNUSED && (it->references || !by_program) && handle_of(it) == name)
        found = mark_busy(it, before);
    unlock_blocks();
    return found;
}

struct block *take_block_of(CUhandle handle, uint32_t *before)
{
    return take(handle, before, true);
}

struct block *take_block_named(CUhandle name, uint32_t *before)
{
    return take(name, before, false);
}

void give_block(struct block *block, uint32_t state)
{
    lock_blocks();
    if (state == UNUSED) {
        block->address = block->references = 0;
        close_export(control, block); /* just now; it would keep memory on the GPU that has no owner */
    }
    block->state = state;
    unlock_blocks();
}

/* One thread's at a time: two calls on ranges would pick up each other's. */
static pthread_mutex_t passing = PTHREAD_MUTEX_INITIALIZER;

void mark_passing(choice *wanted, uint64_t low, uint64_t high)
{
    if (!control)
        return;
    pthread_mutex_lock(&passing);
    lock_open_blocks();
    for (uint32_t i = 0; i < control->used; i++) {
        struct block *it = &control->blocks[i];
        if ((it->state == HERE || it->state == SHARED) && wanted(it, low, high)) {
            it->state = BUSY;
            it->flags |= PASSING;
        }
    }
    unlock_blocks();
}

struct block *next_passing(void)
{
    struct block *found = NULL;
    if (!control)
        return NULL;
    lock_blocks();
    for (uint32_t i = 0; i < control->used && !found; i++)
        if (control->blocks[i].flags & PASSING)
            found = &control->blocks[i];
    if (found)
        found->flags &= ~(uint32_t)PASSING;
    unlock_blocks();
    if (!found)
        pthread_mutex_unlock(&passing);
    return found;
}

CUhandle handle_of(const struct block *block)
{
    return TAG | (uint64_t)block->generation << 16 | (uint64_t)(block - control->blocks);
}

bool is_ours(CUhandle handle)
{
    return (handle & 0xffff000000000000) == TAG;
}
