/* The memory under a block's addresses: made, mapped, handed out and given up. */
#include "physical.h"

#include "driver.h"

CUresult open_to_devices(const struct block *block)
{
    CUmemAccessDesc access[MOST_DEVICES];
    size_t count = 0;
    for (int i = 0; i < MOST_DEVICES; i++)
        if (block->devices >> i & 1)
            access[count++] = (CUmemAccessDesc){{ON_DEVICE, i}, READ_WRITE};
    return count ? driver()->set_access(block->address, block->size, access, count) : CUDA_SUCCESS;
}

CUresult map_memory(const struct block *block, CUhandle handle)
{
    if (!block->address)
        return CUDA_SUCCESS;
    CUresult result = driver()->map(block->address, block->size, 0, handle, 0);
    if (result)
        return result;
    result = open_to_devices(block);
    if (result)
        driver()->unmap(block->address, block->size);
    return result;
}

CUresult put_memory(struct block *block)
{
    CUmemAllocationProp wanted = {.type = PINNED, .handle_types = AS_DESCRIPTOR, .location = {ON_DEVICE, block->device}};
    CUhandle handle;
    wanted.compression = block->compression;
    wanted.rdma = block->rdma;
    CUresult result = driver()->create(&handle, block->size, &wanted, 0);
    if (result)
        return result;
    result = map_memory(block, handle);
    if (result)
        driver()->release(handle);
    else
        block->handle = handle;
    return result;
}

CUresult drop_memory(struct block *block)
{
    CUresult result = block->address ? driver()->unmap(block->address, block->size) : CUDA_SUCCESS;
    if (result)
        return result;
    result = driver()->release(block->handle);
    if (result && map_memory(block, block->handle) == CUDA_SUCCESS)
        return result; /* as it was */
    block->handle = 0;
    return CUDA_SUCCESS;
}
