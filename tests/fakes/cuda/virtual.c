/* The driver's virtual memory management: addresses, and what is mapped there. A test double: see abi.h.
 *
 * Reserved addresses have a window of the same size in the host's address space, so that what is adjoining for a kernel
 * or a copy is adjoining here. Memory that is mapped at several addresses is the same at each.
 */
#include "virtual.h"

#include <sys/mman.h>

#include "physical.h"

struct reservation {
    CUdeviceptr address;
    uint64_t size; /* 0: free */
    char *window;
};

struct mapping {
    CUdeviceptr address;
    uint64_t size; /* 0: free */
    struct memory *memory;
    char *data;
    bool accessible;
};

static struct reservation reserved[MOST_VIRTUAL];
static struct mapping mappings[MOST_VIRTUAL];
static _Atomic int mapping_count; /* entries ever used */
static CUdeviceptr next_address = VIRTUAL_BASE;

static char *empty(char *window, uint64_t size)
{
    int fixed = window ? MAP_FIXED : 0;
    char *data = mmap(window, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0);
    if (data == MAP_FAILED)
        return NULL;
    madvise(data, size, MADV_DONTFORK);
    return data;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wanted,
                                    unsigned long long flags)
{
    (void)alignment, (void)wanted;
    CUresult result = begin_virtual();
    if (result)
        return result;
    if (flags || !size || size % VIRTUAL_GRAIN)
        return end_virtual(CUDA_ERROR_INVALID_VALUE);
    for (int i = 0; i < MOST_VIRTUAL; i++)
        if (!reserved[i].size) {
            char *window = empty(NULL, size);
            if (!window)
                break;
            reserved[i] = (struct reservation){next_address, size, window};
            *address = next_address;
            next_address += size + VIRTUAL_GRAIN;
            return end_virtual(CUDA_SUCCESS);
        }
    return end_virtual(CUDA_ERROR_OUT_OF_MEMORY);
}

static bool overlaps(const struct mapping *it, CUdeviceptr address, uint64_t size)
{
    return it->size && address < it->address + it->size && it->address < address + size;
}

static struct mapping *find(CUdeviceptr address, uint64_t size)
{
    for (int i = 0; i < mapping_count; i++)
        if (overlaps(&mappings[i], address, size))
            return &mappings[i];
    return NULL;
}

static const struct reservation *find_reserved(CUdeviceptr address, uint64_t size)
{
    for (int i = 0; i < MOST_VIRTUAL; i++)
        if (reserved[i].size && address >= reserved[i].address &&
            address + size <= reserved[i].address + reserved[i].size)
            return &reserved[i];
    return NULL;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t size)
{
    CUresult result = begin_virtual();
    if (result)
        return result;
    result = CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < MOST_VIRTUAL && result; i++)
        if (reserved[i].size == size && reserved[i].address == address && !find(address, size)) {
            munmap(reserved[i].window, size);
            reserved[i].size = 0;
            result = CUDA_SUCCESS;
        }
    return end_virtual(result);
}

static bool fill_window(struct mapping *it)
{
    const struct reservation *place = find_reserved(it->address, it->size);
    char *window = place->window + (it->address - place->address);
    char *data = mmap(window, it->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, it->memory->fd, 0);
    if (data == MAP_FAILED)
        return false;
    madvise(data, it->size, MADV_DONTFORK);
    madvise(data, it->size, MADV_HUGEPAGE); /* see new_memfd */
    it->data = data;
    return true;
}

static struct mapping *free_entry(void)
{
    for (int i = 0; i < mapping_count; i++)
        if (!mappings[i].size)
            return &mappings[i];
    return mapping_count < MOST_VIRTUAL ? &mappings[mapping_count++] : NULL;
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, uint64_t handle, unsigned long long flags)
{
    CUresult result = begin_virtual();
    if (result)
        return result;
    struct memory *memory = by_handle(handle);
    /* INVALID_VALUE of a part of memory, too: the real driver says NOT_SUPPORTED for most. */
    if (!memory || flags || offset || size != memory->size || !find_reserved(address, size) || find(address, size))
        return end_virtual(CUDA_ERROR_INVALID_VALUE);
    struct mapping new = {address, size, memory, NULL, false}, *entry = free_entry();
    if (!entry || !fill_window(&new))
        return end_virtual(CUDA_ERROR_OUT_OF_MEMORY);
    memory->references++;
    begin_change();
    *entry = new;
    end_change();
    return end_virtual(CUDA_SUCCESS);
}

/* The range must begin and end with mappings: a part of one cannot be unmapped. */
static bool is_whole(CUdeviceptr address, uint64_t size)
{
    uint64_t found = 0;
    for (int i = 0; i < mapping_count; i++)
        if (overlaps(&mappings[i], address, size)) {
            if (mappings[i].address < address || mappings[i].address + mappings[i].size > address + size)
                return false;
            found += mappings[i].size;
        }
    return size && found == size;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t size)
{
    CUresult result = begin_virtual();
    if (result)
        return result;
    if (!is_whole(address, size))
        return end_virtual(CUDA_ERROR_INVALID_VALUE);
    begin_change();
    for (struct mapping *it; (it = find(address, size));) {
        empty(it->data, it->size);
        drop_reference(it->memory);
        *it = (struct mapping){0};
    }
    end_change();
    return end_virtual(CUDA_SUCCESS);
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count)
{
    CUresult result = begin_virtual();
    if (result)
        return result;
    if (!is_whole(address, size) || !count)
        return end_virtual(CUDA_ERROR_INVALID_VALUE);
    begin_change();
    for (int i = 0; i < mapping_count; i++)
        for (size_t j = 0; j < count && overlaps(&mappings[i], address, size); j++)
            if (access[j].location.id == mappings[i].memory->device)
                mappings[i].accessible = access[j].flags == READ_WRITE;
    end_change();
    return end_virtual(CUDA_SUCCESS);
}

EXPORT CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address)
{
    CUresult result = begin_virtual();
    if (result)
        return result;
    const struct mapping *it = find(address, 1);
    if (!it)
        return end_virtual(CUDA_ERROR_INVALID_VALUE);
    *flags = it->accessible && location->id == it->memory->device ? READ_WRITE : 0;
    return end_virtual(CUDA_SUCCESS);
}

EXPORT CUresult cuMemRetainAllocationHandle(uint64_t *handle, void *address)
{
    CUresult result = begin_virtual();
    if (result)
        return result;
    struct mapping *it = find((CUdeviceptr)(uintptr_t)address, 1);
    if (!it)
        return end_virtual(CUDA_ERROR_INVALID_VALUE);
    it->memory->references++;
    *handle = handle_of(it->memory);
    return end_virtual(CUDA_SUCCESS);
}

bool is_mapped(CUdeviceptr address, size_t size, struct found *found)
{
    CUdeviceptr end = address + (size ? size : 1);
    if (address < VIRTUAL_BASE || end < address)
        return false;
    const struct mapping *it = find(address, 1);
    if (it && found)
        *found = (struct found){it->address, it->size, it->memory ? it->memory->device : 0};
    while (it && it->accessible && end > it->address + it->size)
        it = find(it->address + it->size, 1);
    return it && it->accessible;
}

char *translate_virtual(CUdeviceptr address, size_t size)
{
    if (!is_mapped(address, size, NULL))
        return NULL;
    const struct mapping *it = find(address, 1);
    return it->data ? it->data + (address - it->address) : NULL;
}

void virtual_to_host(char *data)
{
    for (int i = 0; i < mapping_count; i++)
        if (mappings[i].data) {
            empty(mappings[i].data, mappings[i].size);
            mappings[i].data = NULL;
        }
    physical_to_host(data);
}

bool virtual_to_gpus(char *data)
{
    if (!physical_to_gpus(data))
        return false;
    for (int i = 0; i < mapping_count; i++)
        if (mappings[i].size && !fill_window(&mappings[i]))
            return false;
    return true;
}

bool maps_imported_memory(void)
{
    for (int i = 0; i < mapping_count; i++)
        if (mappings[i].size && mappings[i].memory->imported)
            return true;
    return false;
}

/* Legacy IPC, which names what cuMemAlloc has made; none of that can be opened by another process here. */
typedef struct {
    char reserved[64];
} CUipcMemHandle;

EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address)
{
    (void)handle, (void)address;
    return CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags)
{
    (void)address, (void)handle, (void)flags;
    return CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags)
{
    return cuIpcOpenMemHandle_v2(address, handle, flags);
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr address)
{
    (void)address;
    return CUDA_ERROR_INVALID_VALUE;
}
