/* The program's allocations: on a pretended GPU, or moved out to the host. A test double: see abi.h. */
#include "memory.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_ALLOCATIONS = 4096 };
static const uint64_t CONTEXT_BYTES = 8 << 20; /* what a context costs on its GPU */
static const uint64_t GRAIN = 2 << 20;         /* device memory comes in pieces of this size */
static const size_t PITCH = 512;               /* of the rows of cuMemAllocPitch */

struct allocation {
    CUdeviceptr address;
    uint64_t size; /* 0: this entry is free */
    int device;
    char *data; /* NULL for a context, whose bytes are only counted, and while on the host */
    bool is_context;
};

static struct allocation allocations[MAX_ALLOCATIONS];
static _Atomic int allocation_count; /* entries ever used */
static CUdeviceptr next_address = ALLOCATED_BASE;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool managed;

static struct allocation *free_entry(void)
{
    for (int i = 0; i < allocation_count; i++)
        if (allocations[i].size == 0)
            return &allocations[i];
    return allocation_count < MAX_ALLOCATIONS ? &allocations[allocation_count++] : NULL;
}

static CUresult add(int device, uint64_t size, bool is_context, CUdeviceptr *address)
{
    struct allocation *entry = free_entry();
    CUresult result = entry ? charge_bytes(device, size) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result)
        return result;
    char *data = is_context ? NULL : map_on_gpu(size, NULL);
    if (!data && !is_context) {
        discharge_bytes(device, size);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    begin_change();
    *entry = (struct allocation){next_address, size, device, data, is_context};
    end_change();
    *address = next_address;
    next_address += size;
    return CUDA_SUCCESS;
}

static void take_off(struct allocation *entry)
{
    madvise(entry->data, entry->size, MADV_REMOVE);
    munmap(entry->data, entry->size);
    entry->data = NULL;
}

static void release(struct allocation *entry)
{
    discharge_bytes(entry->device, entry->size);
    begin_change();
    if (entry->data)
        take_off(entry);
    *entry = (struct allocation){0};
    end_change();
}

CUresult charge_context(int device)
{
    CUdeviceptr ignored;
    pthread_mutex_lock(&lock);
    CUresult result = add(device, CONTEXT_BYTES, true, &ignored);
    pthread_mutex_unlock(&lock);
    return result;
}

void discharge_context(int device)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < allocation_count; i++)
        if (allocations[i].is_context && allocations[i].device == device) {
            release(&allocations[i]);
            break;
        }
    pthread_mutex_unlock(&lock);
}

static CUresult allocate(const char *name, CUdeviceptr *address, size_t size)
{
    CUresult result = enter_function(name);
    if (result)
        return result;
    pthread_mutex_lock(&lock);
    if (current_device() < 0)
        result = CUDA_ERROR_INVALID_CONTEXT;
    else if (size == 0)
        result = CUDA_ERROR_INVALID_VALUE;
    else
        result = add(current_device(), (size + GRAIN - 1) / GRAIN * GRAIN, false, address);
    pthread_mutex_unlock(&lock);
    leave();
    return result;
}

static CUresult free_allocated(const char *name, CUdeviceptr address)
{
    CUresult result = enter_function(name);
    if (result)
        return result;
    result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < allocation_count && result; i++)
        if (allocations[i].size && !allocations[i].is_context && allocations[i].address == address) {
            release(&allocations[i]);
            result = CUDA_SUCCESS;
        }
    pthread_mutex_unlock(&lock);
    leave();
    return result;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size)
{
    return allocate(__func__, address, size);
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr address)
{
    return free_allocated(__func__, address);
}

/* In the order of a stream, where all is done immediately. */
EXPORT CUresult cuMemAllocAsync(CUdeviceptr *address, size_t size, CUstream stream)
{
    (void)stream;
    return allocate(__func__, address, size);
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream)
{
    (void)stream;
    return free_allocated(__func__, address);
}

EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *address, size_t *pitch, size_t width, size_t height, unsigned element)
{
    (void)element;
    *pitch = (width + PITCH - 1) / PITCH * PITCH;
    return allocate(__func__, address, *pitch * height);
}

/* Managed memory shows from outside: the process maps as much of the device for unified memory. */
EXPORT CUresult cuMemAllocManaged(CUdeviceptr *address, size_t size, unsigned int flags)
{
    char path[512];
    (void)flags;
    CUresult result = allocate(__func__, address, size);
    state_path(path, sizeof path, "nvidia-uvm");
    int fd = result == CUDA_SUCCESS ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666) : -1;
    if (fd >= 0) {
        mmap(NULL, size, PROT_NONE, MAP_SHARED, fd, 0);
        close(fd);
    }
    managed = managed || result == CUDA_SUCCESS;
    return result;
}

bool has_managed_memory(void)
{
    return managed;
}

static const struct allocation *find(CUdeviceptr address, size_t size)
{
    for (int i = 0; i < allocation_count; i++) {
        const struct allocation *it = &allocations[i];
        if (it->size && !it->is_context && address >= it->address && size <= it->size &&
            address - it->address <= it->size - size)
            return it;
    }
    return NULL;
}

bool is_allocated(CUdeviceptr address, size_t size, struct found *found)
{
    const struct allocation *it = find(address, size);
    if (it && found)
        *found = (struct found){it->address, it->size, it->device};
    return it;
}

char *translate_allocated(CUdeviceptr address, size_t size)
{
    pthread_mutex_lock(&lock);
    const struct allocation *it = find(address, size);
    char *data = it && it->data ? it->data + (address - it->address) : NULL;
    pthread_mutex_unlock(&lock);
    return data;
}

uint64_t allocated_bytes(uint64_t bytes[MAX_GPUS], const int moves[MAX_GPUS])
{
    uint64_t total = 0;
    for (int i = 0; i < allocation_count; total += allocations[i++].size)
        if (allocations[i].size)
            bytes[moves[process.devices[allocations[i].device].place]] += allocations[i].size;
    return total;
}

char *allocated_to_host(char *data)
{
    for (int i = 0; i < allocation_count; data += allocations[i++].size)
        if (allocations[i].data) {
            memcpy(data, allocations[i].data, allocations[i].size);
            take_off(&allocations[i]); /* or both copies exist concurrently */
        }
    return data;
}

char *allocated_to_gpus(char *data)
{
    for (int i = 0; i < allocation_count; data += allocations[i++].size)
        if (allocations[i].size && !allocations[i].is_context) {
            allocations[i].data = map_on_gpu(allocations[i].size, data);
            if (!allocations[i].data)
                return NULL;
            madvise(data, allocations[i].size, MADV_DONTNEED);
        }
    return data;
}
