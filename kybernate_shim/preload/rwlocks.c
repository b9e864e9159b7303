/* Readers that wait for one of the driver's locks, without a place in its queue.
 *
 * A call on a stream reads a lock of that stream, which a checkpoint's lock writes; so does each call of NVML in the
 * same process. The C library hands such a lock to all readers that wait when it is unlocked, and their threads may be
 * stopped just then: the driver could not lock the process again before each of them has resumed, which is when the
 * program would compute on placeholders. So a reader inside a library of the driver tries, and sleeps until something
 * was unlocked. All other threads wait in the C library.
 */
#include "rwlocks.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "versions.h"

#define EXPORT __attribute__((visibility("default")))

enum { WAIT = 128, WAKE = 129 }; /* FUTEX_WAIT_PRIVATE and FUTEX_WAKE_PRIVATE */
enum { PAGE_BITS = 12, MOST_KNOWN = 64, OURS = 1 };

typedef int on_lock(pthread_rwlock_t *);
typedef int on_lock_until(pthread_rwlock_t *, const struct timespec *);

static _Atomic uintptr_t lowest, highest;    /* where the driver is mapped */
static _Atomic uintptr_t callers[MOST_KNOWN]; /* pages of other callers, and OURS where they are of the driver's */
static _Atomic uint32_t waiting;          /* threads */
static _Atomic uint32_t unlocked;         /* how often something was, while there were any; a futex(2) */

static void *libc_has(_Atomic(void *) *known, const char *name)
{
    void *found = atomic_load_explicit(known, memory_order_relaxed);
    if (!found) {
        found = dlvsym(RTLD_NEXT, name, OLDEST_GLIBC);
        atomic_store_explicit(known, found, memory_order_relaxed);
    }
    return found;
}

#define LIBC(type, name)                                                                                               \
    static type *libc_##name(void)                                                                                     \
    {                                                                                                                  \
        static _Atomic(void *) known;                                                                                  \
        type *found;                                                                                                   \
        *(void **)&found = libc_has(&known, "pthread_rwlock_" #name);                                                  \
        return found;                                                                                                  \
    }
LIBC(on_lock, rdlock)
LIBC(on_lock, tryrdlock)
LIBC(on_lock, unlock)
LIBC(on_lock_until, timedrdlock)
#undef LIBC

static bool is_mapped_at(const struct dl_phdr_info *library, uintptr_t address, uintptr_t *low, uintptr_t *high)
{
    *low = UINTPTR_MAX, *high = 0;
    for (int i = 0; i < library->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &library->dlpi_phdr[i];
        uintptr_t start = library->dlpi_addr + part->p_vaddr;
        if (part->p_type != PT_LOAD)
            continue;
        *low = start < *low ? start : *low;
        *high = start + part->p_memsz > *high ? start + part->p_memsz : *high;
    }
    return address >= *low && address < *high;
}

static int note_bounds(struct dl_phdr_info *library, size_t size, void *inside)
{
    (void)size;
    uintptr_t low, high;
    if (!is_mapped_at(library, (uintptr_t)inside, &low, &high))
        return 0;
    atomic_store(&highest, high);
    atomic_store(&lowest, low);
    return 1;
}

struct caller {
    uintptr_t address;
    bool drivers;
};

static int look_at(struct dl_phdr_info *library, size_t size, void *argument)
{
    (void)size;
    struct caller *caller = argument;
    uintptr_t low, high;
    if (!is_mapped_at(library, caller->address, &low, &high))
        return 0;
    const char *slash = strrchr(library->dlpi_name, '/');
    caller->drivers = strncmp(slash ? slash + 1 : library->dlpi_name, "libnvidia-", strlen("libnvidia-")) == 0;
    return 1;
}

/* Whether a caller that has to wait is in one of the libraries that come with the driver. The linker's lock is taken
 * for that, but never for the driver itself: its threads must not wait for one of the program's that is stopped.
 */
static bool is_drivers(uintptr_t caller)
{
    if (caller >= atomic_load_explicit(&lowest, memory_order_relaxed) &&
        caller < atomic_load_explicit(&highest, memory_order_relaxed))
        return true;
    uintptr_t page = caller >> PAGE_BITS << PAGE_BITS;
    _Atomic uintptr_t *place = &callers[(caller >> PAGE_BITS) % MOST_KNOWN];
    uintptr_t seen = atomic_load_explicit(place, memory_order_relaxed);
    if ((seen & ~(uintptr_t)OURS) == page)
        return seen & OURS;
    struct caller found = {caller, false};
    dl_iterate_phdr(look_at, &found);
    atomic_store_explicit(place, page | (found.drivers ? OURS : 0), memory_order_relaxed);
    return found.drivers;
}

void watch_rwlocks_of(void *inside)
{
    dl_iterate_phdr(note_bounds, inside);
}

static int wait_to_read(pthread_rwlock_t *lock)
{
    const struct timespec past = {0, 0};
    int result = libc_timedrdlock()(lock, &past); /* one that this thread has locked for writing never becomes free */
    if (result != ETIMEDOUT)
        return result;
    atomic_fetch_add(&waiting, 1);
    for (;;) {
        uint32_t seen = atomic_load(&unlocked);
        result = libc_tryrdlock()(lock);
        if (result != EBUSY)
            break;
        syscall(SYS_futex, &unlocked, WAIT, seen, NULL, NULL, 0);
    }
    atomic_fetch_sub(&waiting, 1);
    return result;
}

EXPORT int pthread_rwlock_rdlock(pthread_rwlock_t *lock)
{
    int result = libc_tryrdlock()(lock);
    if (result != EBUSY)
        return result;
    return is_drivers((uintptr_t)__builtin_return_address(0)) ? wait_to_read(lock) : libc_rdlock()(lock);
}

EXPORT int pthread_rwlock_unlock(pthread_rwlock_t *lock)
{
    int result = libc_unlock()(lock);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&waiting, memory_order_relaxed)) {
        atomic_fetch_add(&unlocked, 1);
        syscall(SYS_futex, &unlocked, WAKE, INT_MAX, NULL, NULL, 0);
    }
    return result;
}
