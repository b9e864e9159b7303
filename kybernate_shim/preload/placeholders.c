/* What stands at the addresses of memory that is away: see placeholders.h. The control thread alone uses this. */
#include "placeholders.h"

#include "driver.h"
#include "physical.h"

enum { KINDS = 4 };

/* An allocation can be mapped as a whole only. Most of a program's blocks consist of few of these: 20 and 2 MiB are
 * what PyTorch asks for. The largest fits what can be away at all; control.py knows their sum. */
static const size_t SIZES[KINDS] = {64 << 20, 20 << 20, 6 << 20, 2 << 20};

static CUhandle placeholders[MOST_DEVICES][KINDS]; /* 0: not made */
static uint32_t covered[MOST_DEVICES];             /* blocks */

static CUresult map_piece(CUdeviceptr address, CUdevice device, int kind)
{
    CUhandle *handle = &placeholders[device][kind];
    if (!*handle) {
        CUmemAllocationProp wanted = {.type = PINNED, .handle_types = AS_DESCRIPTOR, .location = {ON_DEVICE, device}};
        CUresult result = driver()->create(handle, SIZES[kind], &wanted, 0);
        if (result) {
            *handle = 0;
            return result;
        }
    }
    return driver()->map(address, SIZES[kind], 0, *handle, 0);
}

static void release_unused(CUdevice device)
{
    for (int kind = 0; kind < KINDS && !covered[device]; kind++)
        if (placeholders[device][kind] && driver()->release(placeholders[device][kind]) == CUDA_SUCCESS)
            placeholders[device][kind] = 0;
}

/* Map the largest pieces that fit; `done` is how far that went. */
static CUresult map_pieces(const struct block *block, uint64_t *done)
{
    for (int kind = 0; kind < KINDS;) {
        if (block->size - *done < SIZES[kind]) {
            kind++;
            continue;
        }
        CUresult result = map_piece(block->address + *done, block->device, kind);
        if (result == CUDA_SUCCESS)
            *done += SIZES[kind];
        else if (result != CUDA_ERROR_OUT_OF_MEMORY || ++kind == KINDS) /* smaller ones may have room */
            return result;
    }
    return *done == block->size ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cover(struct block *block)
{
    if (!block->address || block->flags & COVERED)
        return CUDA_SUCCESS;
    uint64_t done = 0;
    CUresult result = map_pieces(block, &done);
    if (result == CUDA_SUCCESS)
        result = open_to_devices(block);
    if (result == CUDA_SUCCESS) {
        block->flags |= COVERED;
        covered[block->device]++;
    } else {
        if (done)
            driver()->unmap(block->address, done);
        release_unused(block->device);
    }
    return result;
}

CUresult cover_away(struct control *control)
{
    CUresult first = CUDA_SUCCESS;
    for (uint32_t i = 0; i < control->used; i++) {
        CUresult result = control->blocks[i].state == AWAY ? cover(&control->blocks[i]) : CUDA_SUCCESS;
        if (first == CUDA_SUCCESS)
            first = result;
    }
    return first;
}

CUresult uncover(struct block *block)
{
    if (!(block->flags & COVERED))
        return CUDA_SUCCESS;
    CUresult result = driver()->unmap(block->address, block->size);
    if (result)
        return result;
    block->flags &= ~(uint32_t)COVERED;
    covered[block->device]--;
    release_unused(block->device);
    return CUDA_SUCCESS;
}

CUresult uncover_device(struct control *control, CUdevice device)
{
    CUresult first = CUDA_SUCCESS;
    for (uint32_t i = 0; i < control->used; i++) {
        CUresult result = control->blocks[i].device == device ? uncover(&control->blocks[i]) : CUDA_SUCCESS;
        if (first == CUDA_SUCCESS)
            first = result;
    }
    return first;
}
