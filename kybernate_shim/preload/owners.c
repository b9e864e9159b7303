/* What the driver does to a context's allocations, and does not do to memory that belongs to no context: it frees
 * them with the context, and opens them to peers. */
#include "owners.h"

#include "charges.h"
#include "driver.h"
#include "physical.h"

#define EXPORT __attribute__((visibility("default")))

static _Atomic uint64_t peers[MOST_DEVICES];
static _Atomic uint64_t primaries[MOST_DEVICES]; /* the primary context of each device, 0 where not known */

EXPORT CUresult cuCtxDestroy_v2(CUcontext context);
EXPORT CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags);
EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);
EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device);

uint64_t devices_that_see(CUdevice device)
{
    return (uint64_t)1 << device | peers[device];
}

void note_primary(CUcontext context, CUdevice device)
{
    unsigned int flags;
    int active = 0;
    CUcontext primary = NULL;
    if (primaries[device] || !driver()->primary_state || driver()->primary_state(device, &flags, &active) || !active)
        return;
    if (driver()->primary_retain(&primary, device) != CUDA_SUCCESS)
        return;
    driver()->primary_release(device);
    if (primary == context)
        primaries[device] = (uint64_t)(uintptr_t)context;
}

static bool of_context(const struct block *block, uint64_t context, uint64_t unused)
{
    (void)unused;
    return block->context && block->context == context;
}

static void free_all_of(uint64_t context)
{
    mark_passing(of_context, context, 0);
    for (struct block *block; (block = next_passing());) {
        if (drop_memory(block) == CUDA_SUCCESS)
            driver()->unreserve(block->address, block->size);
        give_block(block, UNUSED);
    }
    refund_context((CUcontext)(uintptr_t)context);
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext context)
{
    CUresult result = driver()->destroy ? driver()->destroy(context) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS)
        free_all_of((uint64_t)(uintptr_t)context);
    return result;
}

static void notice_end(CUdevice device)
{
    unsigned int flags;
    int active = 1;
    if (device < 0 || device >= MOST_DEVICES || !primaries[device] || !driver()->primary_state)
        return;
    if (driver()->primary_state(device, &flags, &active) == CUDA_SUCCESS && !active)
        free_all_of(atomic_exchange(&primaries[device], 0));
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    CUresult result = driver()->primary_release ? driver()->primary_release(device) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS)
        notice_end(device);
    return result;
}

EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device)
{
    CUresult result = driver()->primary_reset ? driver()->primary_reset(device) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS)
        notice_end(device);
    return result;
}

static bool on_device(const struct block *block, uint64_t device, uint64_t unused)
{
    (void)unused;
    return block->context && (uint64_t)block->device == device;
}

static void open_to(CUdevice peer, CUdevice device)
{
    CUmemAccessDesc access = {{ON_DEVICE, device}, READ_WRITE};
    atomic_fetch_or(&peers[peer], (uint64_t)1 << device);
    mark_passing(on_device, (uint64_t)peer, 0);
    for (struct block *block; (block = next_passing());) {
        if (driver()->set_access(block->address, block->size, &access, 1) == CUDA_SUCCESS)
            block->devices |= (uint64_t)1 << device;
        give_block(block, HERE);
    }
}

EXPORT CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags)
{
    CUdevice owner, device;
    CUcontext popped;
    CUresult result = driver()->enable_peer ? driver()->enable_peer(peer, flags) : CUDA_ERROR_NOT_FOUND;
    if (result || driver()->device(&device) || driver()->push(peer))
        return result;
    CUresult known = driver()->device(&owner);
    driver()->pop(&popped);
    if (known == CUDA_SUCCESS && owner >= 0 && owner < MOST_DEVICES && device >= 0 && device < MOST_DEVICES)
        open_to(owner, device);
    return result;
}
