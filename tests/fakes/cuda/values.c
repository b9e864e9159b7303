/* Words in device memory that a stream writes, or waits for. A test double: see abi.h. */
#include <string.h>
#include <unistd.h>

#include "pointers.h"

enum { AT_LEAST, EQUAL, ANY_BIT, NOT_ALL_BITS, CONDITIONS }; /* CUstreamWaitValue_flags */
enum { WAIT_32 = 1, WRITE_32 = 2, WAIT_64 = 4, WRITE_64 = 5 };

/* CUstreamBatchMemOpParams. */
union operation {
    int kind;
    struct {
        int kind;
        CUdeviceptr address;
        uint64_t value;
        unsigned flags;
        CUdeviceptr alias;
    } word;
    uint64_t room[6];
};

static CUresult write_word(const char *name, CUdeviceptr address, uint64_t value, size_t size)
{
    CUresult result = enter_with(name, address, size);
    if (result)
        return result;
    void *word = translate(address, size);
    if (word)
        memcpy(word, &value, size); /* on a machine of the low byte first */
    leave();
    return word ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static bool fulfils(uint64_t word, uint64_t value, unsigned condition, size_t size)
{
    uint64_t difference = word - value, all = size == 8 ? UINT64_MAX : UINT32_MAX;
    switch (condition) {
    case AT_LEAST:
        return !(difference >> (8 * size - 1) & 1);
    case EQUAL:
        return word == value;
    case ANY_BIT:
        return word & value;
    default:
        return ~(word | value) & all;
    }
}

/* Here, the caller waits, where it is its stream on a real GPU; a lock does not wait for that. */
static CUresult await_word(const char *name, CUdeviceptr address, uint64_t value, unsigned condition, size_t size)
{
    for (;; usleep(100)) {
        uint64_t word = 0;
        CUresult result = condition < CONDITIONS ? enter_with(name, address, size) : CUDA_ERROR_INVALID_VALUE;
        if (result)
            return result;
        const void *data = translate(address, size);
        if (data)
            memcpy(&word, data, size);
        leave();
        if (!data || fulfils(word, value, condition, size))
            return data ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    }
}

EXPORT CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, uint32_t value, unsigned int flags)
{
    (void)stream, (void)flags;
    return write_word(__func__, address, value, sizeof value);
}

EXPORT CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr address, uint64_t value, unsigned int flags)
{
    (void)stream, (void)flags;
    return write_word(__func__, address, value, sizeof value);
}

EXPORT CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, uint32_t value, unsigned int flags)
{
    (void)stream;
    return await_word(__func__, address, value, flags, sizeof value);
}

EXPORT CUresult cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr address, uint64_t value, unsigned int flags)
{
    (void)stream;
    return await_word(__func__, address, value, flags, sizeof value);
}

static CUresult do_operation(const char *name, const union operation *it)
{
    size_t size = it->kind == WAIT_64 || it->kind == WRITE_64 ? 8 : 4;
    uint64_t value = size == 8 ? it->word.value : (uint32_t)it->word.value;
    if (it->kind == WRITE_32 || it->kind == WRITE_64)
        return write_word(name, it->word.address, value, size);
    if (it->kind == WAIT_32 || it->kind == WAIT_64)
        return await_word(name, it->word.address, value, it->word.flags, size);
    return CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT CUresult cuStreamBatchMemOp_v2(CUstream stream, unsigned int count, const union operation *them,
                                      unsigned int flags)
{
    (void)stream, (void)flags;
    CUresult result = CUDA_SUCCESS;
    for (unsigned i = 0; i < count && !result; i++)
        result = do_operation(__func__, &them[i]);
    return result;
}
