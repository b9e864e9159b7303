/* The program's allocations: 2 MiB and more become memory that can be exported, at addresses that never change.
 *
 * Where that is impossible (a driver without a call, a full table, a property that we do not know), the library makes
 * the driver's own call, with the program's own arguments.
 */
#include "addresses.h"
#include "charges.h"
#include "driver.h"
#include "imports.h"
#include "owners.h"
#include "physical.h"
#include "uses.h"

#define EXPORT __attribute__((visibility("default")))

static const size_t LEAST = 2 << 20; /* below it the driver packs many allocations into one of its own pieces */

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size);
EXPORT CUresult cuMemFree_v2(CUdeviceptr address);
EXPORT CUresult cuMemCreate(CUhandle *handle, size_t size, const CUmemAllocationProp *wanted, unsigned long long flags);
EXPORT CUresult cuMemRelease(CUhandle handle);

/* Constant properties of a device, from the driver: 0 until it is queried. */
static _Atomic size_t grains[MOST_DEVICES];
static _Atomic uint8_t rdma_known[MOST_DEVICES]; /* 1: cannot, 2: can */

static uint8_t with_rdma(CUdevice device)
{
    int supported = 0;
    if (!rdma_known[device]) {
        CUresult result = driver()->attribute(&supported, RDMA_WITH_VIRTUAL_MEMORY, device);
        rdma_known[device] = result == CUDA_SUCCESS && supported ? 2 : 1;
    }
    return rdma_known[device] == 2;
}

static size_t grain_of(CUdevice device)
{
    CUmemAllocationProp wanted = {.type = PINNED, .handle_types = AS_DESCRIPTOR, .location = {ON_DEVICE, device}};
    size_t grain = 0;
    if (!grains[device] && driver()->granularity(&grain, &wanted, MINIMUM) == CUDA_SUCCESS)
        grains[device] = grain;
    return grains[device];
}

static CUresult round_up(size_t *size, CUdevice device)
{
    size_t grain = grain_of(device);
    if (grain == 0 || *size > SIZE_MAX - grain)
        return CUDA_ERROR_INVALID_VALUE;
    *size = (*size + grain - 1) / grain * grain;
    return CUDA_SUCCESS;
}

/* Reserve addresses and put memory there. */
static CUresult make(struct block *block, CUcontext context, CUdevice device, size_t size)
{
    CUresult result = round_up(&size, device);
    if (result)
        return result;
    block->context = (uint64_t)(uintptr_t)context;
    block->device = device;
    block->devices = devices_that_see(device);
    block->rdma = with_rdma(device);
    block->size = size;
    result = take_addresses(&block->address, size);
    if (result)
        return result;
    result = put_memory(block);
    if (result) {
        CUdeviceptr free = block->address;
        block->address = 0; /* no two blocks are at one address */
        keep_addresses(free, size);
    }
    return result;
}

static struct block *take_over(size_t size)
{
    CUcontext context = NULL;
    CUdevice device;
    if (driver()->context(&context) || !context || driver()->device(&device) || device < 0 || device >= MOST_DEVICES)
        return NULL;
    if (!blocks_ready())
        return NULL;
    struct block *block = claim_block();
    if (!block)
        return NULL;
    note_primary(context, device);
    if (make(block, context, device, size) == CUDA_SUCCESS)
        return block;
    give_block(block, UNUSED);
    return NULL;
}

static CUresult allocate(CUdeviceptr *address, size_t size)
{
    struct block *block = driver()->complete && address && size >= LEAST ? take_over(size) : NULL;
    if (!block)
        return driver()->alloc ? driver()->alloc(address, size) : CUDA_ERROR_NOT_FOUND;
    *address = block->address;
    give_block(block, HERE);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size)
{
    note_use();
    struct charge charge;
    if (!begin_charge(&charge, size))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = allocate(address, size);
    return end_charge(&charge, result, AT_ADDRESS, result ? 0 : *address);
}

/* The driver's own free waits for the queued work; unmapping does not. */
static CUresult await_work(CUcontext context)
{
    CUcontext mine = NULL;
    driver()->context(&mine);
    if (mine == context)
        return driver()->synchronize();
    CUresult result = driver()->push(context);
    if (result)
        return result;
    result = driver()->synchronize();
    driver()->pop(&mine);
    return result;
}

/* Find what cuMemAlloc_v2 has made at an address, and nowhere else in it. */
static struct block *take_allocation(CUdeviceptr address, uint32_t *before)
{
    struct block *block = take_block_at(address, before);
    if (!block || (block->address == address && !(block->flags & BY_PROGRAM)))
        return block;
    give_block(block, *before);
    return NULL;
}

static CUresult free_memory(CUdeviceptr address)
{
    uint32_t before;
    CUresult result;
    struct block *block = take_allocation(address, &before);
    if (block) {
        CUcontext context = (CUcontext)(uintptr_t)block->context;
        give_block(block, before); /* the work may take long, and a suspend cannot wait for what is BUSY */
        result = await_work(context);
        if (result)
            return result;
        block = take_allocation(address, &before);
    }
    if (!block)
        return driver()->free ? driver()->free(address) : CUDA_ERROR_NOT_FOUND;
    result = drop_memory(block);
    if (result) {
        give_block(block, before);
        return result;
    }
    CUdeviceptr free = block->address;
    size_t size = block->size;
    give_block(block, UNUSED);
    keep_addresses(free, size);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr address)
{
    note_use();
    CUresult result = free_memory(address);
    if (result == CUDA_SUCCESS)
        refund(AT_ADDRESS, address);
    return result;
}

static bool is_known_kind(const CUmemAllocationProp *wanted)
{
    return wanted->type == PINNED && wanted->location.type == ON_DEVICE && wanted->location.id >= 0 &&
           wanted->location.id < MOST_DEVICES && !(wanted->handle_types & ~AS_DESCRIPTOR) && !wanted->win32 &&
           !wanted->usage;
}

static CUresult create_ours(struct block *block, size_t size, const CUmemAllocationProp *wanted)
{
    block->size = size;
    block->device = wanted->location.id;
    block->compression = wanted->compression;
    block->rdma = wanted->rdma;
    block->flags = BY_PROGRAM | (wanted->handle_types ? SHAREABLE : 0);
    return put_memory(block);
}

static CUresult create(CUhandle *handle, size_t size, const CUmemAllocationProp *wanted, unsigned long long flags)
{
    struct block *block = NULL;
    if (driver()->complete && handle && wanted && !flags && size >= LEAST && is_known_kind(wanted) && blocks_ready())
        block = claim_block();
    if (block && create_ours(block, size, wanted) == CUDA_SUCCESS) {
        block->references = 1;
        *handle = handle_of(block);
        give_block(block, HERE);
        return CUDA_SUCCESS;
    }
    if (block)
        give_block(block, UNUSED);
    return driver()->create ? driver()->create(handle, size, wanted, flags) : CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuMemCreate(CUhandle *handle, size_t size, const CUmemAllocationProp *wanted, unsigned long long flags)
{
    note_use();
    struct charge charge;
    CUdevice device = wanted && wanted->location.type == ON_DEVICE ? wanted->location.id : -1;
    if (!begin_charge_on(&charge, size, device))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = create(handle, size, wanted, flags);
    return end_charge(&charge, result, BY_HANDLE, result ? 0 : *handle);
}

static CUresult release_theirs(CUhandle handle)
{
    CUresult result = driver()->release ? driver()->release(handle) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS)
        note_released(handle);
    return result;
}

static CUresult release_handle(CUhandle handle)
{
    uint32_t before;
    struct block *block = take_block_of(handle, &before);
    if (!block)
        return release_theirs(handle);
    if (--block->references || block->address) { /* as long as it is mapped, it is there */
        give_block(block, before);
        return CUDA_SUCCESS;
    }
    CUresult result = drop_memory(block);
    give_block(block, UNUSED);
    return result;
}

EXPORT CUresult cuMemRelease(CUhandle handle)
{
    note_use();
    CUresult result = release_handle(handle);
    if (result == CUDA_SUCCESS)
        charge_released(handle);
    return result;
}
