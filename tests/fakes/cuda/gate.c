/* The gate that every call of the driver passes: a locked process is one whose restore thread has shut it.
 * A test double: see abi.h.
 */
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "process.h"
#include "switches.h"

#define SHUT 0x80000000u

/* SHUT, and the number of threads inside. One word: a thread that is stopped between counting itself and a look at the
 * gate would keep the next lock waiting. */
static _Atomic uint32_t gate;

static void pass(void)
{
    for (;;) {
        uint32_t seen = atomic_load(&gate);
        if (seen & SHUT)
            syscall(SYS_futex, &gate, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
        else if (atomic_compare_exchange_weak(&gate, &seen, seen + 1))
            return;
    }
}

CUresult enter_function(const char *name)
{
    if (!process.started)
        return CUDA_ERROR_NOT_INITIALIZED;
    pass();
    struct switched what = switched_function(name);
    act_before(what);
    if (what.action == ERROR)
        leave();
    return what.action == ERROR ? what.error : CUDA_SUCCESS;
}

void leave(void)
{
    atomic_fetch_sub(&gate, 1);
}

bool shut_gate(uint32_t timeout_ms)
{
    struct timespec began, now;
    clock_gettime(CLOCK_MONOTONIC, &began);
    atomic_fetch_or(&gate, SHUT);
    while (atomic_load(&gate) != SHUT) {
        usleep(100);
        clock_gettime(CLOCK_MONOTONIC, &now);
        long passed = (now.tv_sec - began.tv_sec) * 1000 + (now.tv_nsec - began.tv_nsec) / 1000000;
        if (timeout_ms && passed >= (long)timeout_ms) {
            open_gate();
            return false;
        }
    }
    return true;
}

void open_gate(void)
{
    atomic_fetch_and(&gate, ~SHUT);
    syscall(SYS_futex, &gate, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}
