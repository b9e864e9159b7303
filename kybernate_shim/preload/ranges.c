/* The program's own virtual memory management, on the handles that it got from us. */
#include "charges.h"
#include "driver.h"
#include "imports.h"
#include "physical.h"
#include "uses.h"

#define EXPORT __attribute__((visibility("default")))

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUhandle handle, unsigned long long flags);
EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t size);
EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count);
EXPORT CUresult cuMemExportToShareableHandle(void *shared, CUhandle handle, int type, unsigned long long flags);
EXPORT CUresult cuMemRetainAllocationHandle(CUhandle *handle, void *address);
EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *found, CUhandle handle);
EXPORT CUresult cuMulticastBindMem(CUhandle team, size_t at, CUhandle handle, size_t offset, size_t size,
                                   unsigned long long flags);

static CUresult map_theirs(CUdeviceptr address, size_t size, size_t offset, CUhandle handle, unsigned long long flags)
{
    CUresult result = driver()->map ? driver()->map(address, size, offset, handle, flags) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS)
        note_mapped(handle, address, size);
    return result;
}

static CUresult map_handle(CUdeviceptr address, size_t size, size_t offset, CUhandle handle, unsigned long long flags)
{
    uint32_t before;
    struct block *block = take_block_of(handle, &before);
    if (!block)
        return map_theirs(address, size, offset, handle, flags);
    CUresult result = driver()->map(address, size, offset, block->handle, flags);
    if (result == CUDA_SUCCESS) {
        if (block->address || offset || size != block->size || flags)
            block->flags |= PRIVATE; /* a second mapping, or a part */
        else
            block->address = address;
    }
    give_block(block, before);
    return result;
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUhandle handle, unsigned long long flags)
{
    note_use();
    CUresult result = map_handle(address, size, offset, handle, flags);
    if (result == CUDA_SUCCESS)
        charge_mapped(handle, address, size);
    return result;
}

static bool in_range(const struct block *block, uint64_t low, uint64_t high)
{
    return block->flags & BY_PROGRAM && block->address >= low && block->address < high;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t size)
{
    note_use();
    if (!driver()->unmap)
        return CUDA_ERROR_NOT_FOUND;
    mark_passing(in_range, address, address + size);
    CUresult result = driver()->unmap(address, size);
    if (result == CUDA_SUCCESS) {
        note_unmapped(address, size);
        charge_unmapped(address, size);
    }
    for (struct block *block; (block = next_passing());) {
        uint32_t after = HERE;
        if (result == CUDA_SUCCESS) {
            block->address = block->devices = 0;
            if (!block->references) {
                driver()->release(block->handle);
                after = UNUSED;
            }
        }
        give_block(block, after);
    }
    return result;
}

static void note_access(struct block *block, const CUmemAccessDesc *access)
{
    uint64_t bit = (uint64_t)1 << (access->location.id & 63);
    if (access->location.type != ON_DEVICE || (access->flags && access->flags != READ_WRITE))
        block->flags |= PRIVATE;
    else if (access->flags)
        block->devices |= bit;
    else
        block->devices &= ~bit;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count)
{
    note_use();
    if (!driver()->set_access)
        return CUDA_ERROR_NOT_FOUND;
    mark_passing(in_range, address, address + size);
    CUresult result = driver()->set_access(address, size, access, count);
    for (struct block *block; (block = next_passing());) {
        for (size_t i = 0; result == CUDA_SUCCESS && i < count; i++)
            note_access(block, &access[i]);
        give_block(block, HERE);
    }
    return result;
}

/* Another process that holds the memory would lose track of it when it moves. */
EXPORT CUresult cuMemExportToShareableHandle(void *shared, CUhandle handle, int type, unsigned long long flags)
{
    uint32_t before;
    struct block *block = take_block_of(handle, &before);
    if (!block)
        return driver()->share ? driver()->share(shared, handle, type, flags) : CUDA_ERROR_NOT_FOUND;
    CUresult result = driver()->share(shared, block->handle, type, flags);
    if (result == CUDA_SUCCESS)
        block->flags |= PRIVATE;
    give_block(block, before);
    return result;
}

static CUresult retain_theirs(CUhandle *handle, void *address)
{
    CUresult result = driver()->retain ? driver()->retain(handle, address) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS)
        note_retained(*handle, (CUdeviceptr)(uintptr_t)address);
    return result;
}

static CUresult retain(CUhandle *handle, void *address)
{
    uint32_t before;
    struct block *block = take_block_at((CUdeviceptr)(uintptr_t)address, &before);
    if (!block)
        return retain_theirs(handle, address);
    bool by_program = block->flags & BY_PROGRAM;
    if (by_program) {
        block->references++;
        *handle = handle_of(block);
    }
    give_block(block, before);
    return by_program ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; /* the driver's answer for what cuMemAlloc made */
}

EXPORT CUresult cuMemRetainAllocationHandle(CUhandle *handle, void *address)
{
    CUresult result = retain(handle, address);
    if (result == CUDA_SUCCESS)
        charge_retained(*handle, (CUdeviceptr)(uintptr_t)address);
    return result;
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *found, CUhandle handle)
{
    uint32_t before;
    struct block *block = take_block_of(handle, &before);
    if (!block)
        return driver()->properties ? driver()->properties(found, handle) : CUDA_ERROR_NOT_FOUND;
    CUresult result = driver()->properties ? driver()->properties(found, block->handle) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS && !(block->flags & SHAREABLE))
        found->handle_types &= ~AS_DESCRIPTOR;
    give_block(block, before);
    return result;
}

EXPORT CUresult cuMulticastBindMem(CUhandle team, size_t at, CUhandle handle, size_t offset, size_t size,
                                   unsigned long long flags)
{
    uint32_t before;
    if (!driver()->multicast)
        return CUDA_ERROR_NOT_FOUND;
    struct block *block = take_block_of(handle, &before);
    if (!block)
        return driver()->multicast(team, at, handle, offset, size, flags);
    CUresult result = driver()->multicast(team, at, block->handle, offset, size, flags);
    if (result == CUDA_SUCCESS)
        block->flags |= PRIVATE;
    give_block(block, before);
    return result;
}
