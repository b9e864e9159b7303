/* Looks up device pointers, with the gate passed or not. A test double: see abi.h. */
#include "pointers.h"

#include <sched.h>

#include "memory.h"
#include "virtual.h"

/* Changes that were begun, and those that have ended: equal while what there is does not change. */
static _Atomic unsigned begun, ended;

void begin_change(void)
{
    atomic_fetch_add(&begun, 1);
}

void end_change(void)
{
    atomic_fetch_add(&ended, 1);
}

bool is_device_address(CUdeviceptr address)
{
    return address >> 40 == ALLOCATED_BASE >> 40;
}

bool names_memory(CUdeviceptr address, size_t size, struct found *found)
{
    for (;; sched_yield()) {
        unsigned before = atomic_load(&ended);
        bool still = atomic_load(&begun) == before;
        bool is = is_allocated(address, size, found) || is_mapped(address, size, found);
        if (still && atomic_load(&begun) == before)
            return is;
    }
}

void *translate(CUdeviceptr address, size_t size)
{
    char *data = translate_allocated(address, size);
    return data ? data : translate_virtual(address, size);
}

CUresult enter_with(const char *name, CUdeviceptr address, size_t size)
{
    if (process.started && !names_memory(address, size, NULL))
        return CUDA_ERROR_INVALID_VALUE;
    return enter_function(name);
}
