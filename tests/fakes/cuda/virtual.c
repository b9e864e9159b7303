/* The driver's virtual memory management: addresses, memory, and what joins them. A test double: see abi.h.
 *
 * Memory is a memfd, so that a descriptor of it can be handed to another process, and is the same memory there.
 * What was measured with driver 580.159.04 on an H100: exportable memory is checkpointed and restored like any other,
 * also after it was exported and the importer has let go of it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "switches.h"
#include "virtual.h"

enum { MOST = 4096, GRAIN = 2 << 20, POSIX_FD = 1, MAGIC = 0x7700 };
#define FIRST_ADDRESS ((CUdeviceptr)0x6fdb00000000)

typedef struct {
    int type, id;
} CUmemLocation;

typedef struct {
    int type, handle_types;
    CUmemLocation location;
    void *win32;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
} CUmemAllocationProp;

typedef struct {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;

struct memory {
    int references; /* handles and mappings; 0: this entry is free */
    int fd;         /* -1 while it is on the host */
    int device;
    int handle_types;
    bool imported;
    uint64_t size;
};

struct range {
    CUdeviceptr address;
    uint64_t size; /* 0: free */
};

struct mapping {
    struct range range;
    struct memory *memory;
    char *data;
    bool accessible;
};

static struct memory memories[MOST];
static struct range reserved[MOST];
static struct mapping mappings[MOST];
static CUdeviceptr next_address = FIRST_ADDRESS;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned calls;

/* Enter a call that can be made to fail by the switch "vmm". */
static CUresult begin_function(const char *name)
{
    CUresult result = enter_function(name);
    if (result)
        return result;
    pthread_mutex_lock(&lock);
    const char *switches = getenv("FAKE_CUDA_FAIL");
    struct switched what = switched(switches ? switches : "", "vmm", ++calls, 0);
    if (what.action != ERROR) {
        act_before(what);
        return CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    leave();
    return what.error;
}

#define begin() begin_function(__func__)

static CUresult end(CUresult result)
{
    pthread_mutex_unlock(&lock);
    leave();
    return result;
}

static struct memory *by_handle(uint64_t handle)
{
    uint64_t index = handle - MAGIC;
    return index < MOST && memories[index].references ? &memories[index] : NULL;
}

static uint64_t handle_of(const struct memory *memory)
{
    return (uint64_t)(memory - memories) + MAGIC;
}

static void drop_reference(struct memory *memory)
{
    if (--memory->references)
        return;
    close(memory->fd);
    if (!memory->imported)
        discharge_bytes(memory->device, memory->size);
}

static struct memory *new_memory(int fd, uint64_t size, int device, int handle_types, bool imported)
{
    for (int i = 0; i < MOST && fd >= 0; i++)
        if (!memories[i].references) {
            memories[i] = (struct memory){1, fd, device, handle_types, imported, size};
            return &memories[i];
        }
    if (fd >= 0)
        close(fd);
    return NULL;
}

/* The card's number is kept in the name of the memfd: an importer asks for the properties. */
static int new_memfd(int place, uint64_t size)
{
    char name[] = "fake-vram-00";
    name[10] = (char)('0' + place / 10);
    name[11] = (char)('0' + place % 10);
    int fd = (int)syscall(SYS_memfd_create, name, 1);
    if (fd >= 0 && ftruncate(fd, (off_t)size) < 0) {
        close(fd);
        fd = -1;
    }
    return fd;
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *wanted, int option)
{
    (void)wanted, (void)option;
    *size = GRAIN;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemCreate(uint64_t *handle, size_t size, const CUmemAllocationProp *wanted, unsigned long long flags)
{
    CUresult result = begin();
    if (result)
        return result;
    int device = wanted->location.id;
    if (flags || !size || size % GRAIN || wanted->type != 1 || wanted->location.type != 1)
        return end(CUDA_ERROR_INVALID_VALUE);
    if (device < 0 || device >= process.count)
        return end(CUDA_ERROR_INVALID_DEVICE);
    result = charge_bytes(device, size);
    if (result)
        return end(result);
    int fd = new_memfd(process.devices[device].place, size);
    struct memory *made = new_memory(fd, size, device, wanted->handle_types, false);
    if (!made) {
        discharge_bytes(device, size);
        return end(CUDA_ERROR_OUT_OF_MEMORY);
    }
    *handle = handle_of(made);
    return end(CUDA_SUCCESS);
}

EXPORT CUresult cuMemRelease(uint64_t handle)
{
    CUresult result = begin();
    if (result)
        return result;
    struct memory *memory = by_handle(handle);
    if (memory)
        drop_reference(memory);
    return end(memory ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wanted,
                                    unsigned long long flags)
{
    (void)alignment, (void)wanted;
    CUresult result = begin();
    if (result)
        return result;
    result = CUDA_ERROR_OUT_OF_MEMORY;
    if (flags || !size || size % GRAIN)
        return end(CUDA_ERROR_INVALID_VALUE);
    for (int i = 0; i < MOST && result; i++)
        if (!reserved[i].size) {
            reserved[i] = (struct range){next_address, size};
            *address = next_address;
            next_address += size + GRAIN;
            result = CUDA_SUCCESS;
        }
    return end(result);
}

static bool overlaps(const struct range *range, CUdeviceptr address, uint64_t size)
{
    return range->size && address < range->address + range->size && range->address < address + size;
}

static bool is_mapped(CUdeviceptr address, uint64_t size)
{
    for (int i = 0; i < MOST; i++)
        if (overlaps(&mappings[i].range, address, size))
            return true;
    return false;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t size)
{
    CUresult result = begin();
    if (result)
        return result;
    result = CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < MOST && result; i++)
        if (reserved[i].size == size && reserved[i].address == address && !is_mapped(address, size)) {
            reserved[i].size = 0;
            result = CUDA_SUCCESS;
        }
    return end(result);
}

static bool is_reserved(CUdeviceptr address, uint64_t size)
{
    for (int i = 0; i < MOST; i++)
        if (reserved[i].size && address >= reserved[i].address &&
            address + size <= reserved[i].address + reserved[i].size)
            return true;
    return false;
}

static char *map_memory(const struct memory *memory)
{
    char *data = mmap(NULL, memory->size, PROT_READ | PROT_WRITE, MAP_SHARED, memory->fd, 0);
    if (data == MAP_FAILED)
        return NULL;
    madvise(data, memory->size, MADV_DONTFORK);
    return data;
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, uint64_t handle, unsigned long long flags)
{
    CUresult result = begin();
    if (result)
        return result;
    struct memory *memory = by_handle(handle);
    result = CUDA_ERROR_INVALID_VALUE; /* of a part of memory, too: the real driver says NOT_SUPPORTED for most */
    if (!memory || flags || offset || size != memory->size || !is_reserved(address, size) || is_mapped(address, size))
        return end(result);
    for (int i = 0; i < MOST && result; i++)
        if (!mappings[i].range.size) {
            char *data = map_memory(memory);
            if (!data)
                return end(CUDA_ERROR_OUT_OF_MEMORY);
            mappings[i] = (struct mapping){{address, size}, memory, data, false};
            memory->references++;
            result = CUDA_SUCCESS;
        }
    return end(result);
}

/* The range must begin and end with mappings: a part of one cannot be unmapped. */
static bool is_whole(CUdeviceptr address, uint64_t size)
{
    uint64_t found = 0;
    for (int i = 0; i < MOST; i++)
        if (overlaps(&mappings[i].range, address, size)) {
            if (mappings[i].range.address < address ||
                mappings[i].range.address + mappings[i].range.size > address + size)
                return false;
            found += mappings[i].range.size;
        }
    return found == size;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t size)
{
    CUresult result = begin();
    if (result)
        return result;
    if (!is_whole(address, size))
        return end(CUDA_ERROR_INVALID_VALUE);
    for (int i = 0; i < MOST; i++)
        if (overlaps(&mappings[i].range, address, size)) {
            munmap(mappings[i].data, mappings[i].range.size);
            drop_reference(mappings[i].memory);
            mappings[i] = (struct mapping){0};
        }
    return end(CUDA_SUCCESS);
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count)
{
    CUresult result = begin();
    if (result)
        return result;
    if (!is_whole(address, size) || !count)
        return end(CUDA_ERROR_INVALID_VALUE);
    for (int i = 0; i < MOST; i++)
        for (size_t j = 0; j < count && overlaps(&mappings[i].range, address, size); j++)
            if (access[j].location.id == mappings[i].memory->device)
                mappings[i].accessible = access[j].flags == 3;
    return end(CUDA_SUCCESS);
}

EXPORT CUresult cuMemExportToShareableHandle(void *shared, uint64_t handle, int type, unsigned long long flags)
{
    CUresult result = begin();
    if (result)
        return result;
    struct memory *memory = by_handle(handle);
    if (!memory || flags || type != POSIX_FD || !(memory->handle_types & POSIX_FD))
        return end(CUDA_ERROR_INVALID_VALUE);
    int fd = dup(memory->fd);
    if (fd < 0)
        return end(CUDA_ERROR_OPERATING_SYSTEM);
    *(int *)shared = fd;
    return end(CUDA_SUCCESS);
}

static int device_of(int fd)
{
    char link[64], path[64] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    const char *name = length > 0 ? strstr(path, "fake-vram-") : NULL;
    int place = name ? atoi(name + 10) : -1;
    for (int i = 0; i < process.count; i++)
        if (process.devices[i].place == place)
            return i;
    return -1;
}

EXPORT CUresult cuMemImportFromShareableHandle(uint64_t *handle, void *shared, int type)
{
    struct stat about;
    CUresult result = begin();
    if (result)
        return result;
    int fd = type == POSIX_FD ? dup((int)(intptr_t)shared) : -1;
    if (fd < 0 || fstat(fd, &about) < 0 || device_of(fd) < 0) {
        if (fd >= 0)
            close(fd);
        return end(CUDA_ERROR_INVALID_VALUE);
    }
    struct memory *made = new_memory(fd, (uint64_t)about.st_size, device_of(fd), POSIX_FD, true);
    if (made)
        *handle = handle_of(made);
    return end(made ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *found, uint64_t handle)
{
    CUresult result = begin();
    if (result)
        return result;
    const struct memory *memory = by_handle(handle);
    if (!memory)
        return end(CUDA_ERROR_INVALID_VALUE);
    *found = (CUmemAllocationProp){.type = 1, .handle_types = memory->handle_types, .location = {1, memory->device}};
    return end(CUDA_SUCCESS);
}

EXPORT CUresult cuMemRetainAllocationHandle(uint64_t *handle, void *address)
{
    CUresult result = begin();
    if (result)
        return result;
    result = CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < MOST && result; i++)
        if (overlaps(&mappings[i].range, (CUdeviceptr)(uintptr_t)address, 1)) {
            mappings[i].memory->references++;
            *handle = handle_of(mappings[i].memory);
            result = CUDA_SUCCESS;
        }
    return end(result);
}

char *translate_virtual(CUdeviceptr address, size_t size)
{
    char *found = NULL;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST && !found && address >= FIRST_ADDRESS; i++) {
        const struct mapping *it = &mappings[i];
        if (it->data && it->accessible && address >= it->range.address && size <= it->range.size &&
            address - it->range.address <= it->range.size - size)
            found = it->data + (address - it->range.address);
    }
    pthread_mutex_unlock(&lock);
    return found;
}

uint64_t virtual_bytes(uint64_t bytes[MAX_CARDS], const int moves[MAX_CARDS])
{
    uint64_t total = 0;
    for (int i = 0; i < MOST; i++)
        if (memories[i].references && !memories[i].imported) {
            bytes[moves[process.devices[memories[i].device].place]] += memories[i].size;
            total += memories[i].size;
        }
    return total;
}

char *virtual_to_host(char *data)
{
    for (int i = 0; i < MOST; i++)
        if (mappings[i].data) {
            munmap(mappings[i].data, mappings[i].range.size);
            mappings[i].data = NULL;
        }
    for (int i = 0; i < MOST; i++)
        if (memories[i].references && !memories[i].imported) {
            for (uint64_t done = 0; done < memories[i].size;)
                done += (uint64_t)pread(memories[i].fd, data + done, memories[i].size - done, (off_t)done);
            data += memories[i].size;
            close(memories[i].fd);
            memories[i].fd = -1;
        }
    return data;
}

bool maps_imported_memory(void)
{
    for (int i = 0; i < MOST; i++)
        if (mappings[i].range.size && mappings[i].memory->imported)
            return true;
    return false;
}

char *virtual_to_cards(char *data)
{
    for (int i = 0; i < MOST; i++)
        if (memories[i].references && !memories[i].imported) {
            memories[i].fd = new_memfd(process.devices[memories[i].device].place, memories[i].size);
            for (uint64_t done = 0; done < memories[i].size;)
                done += (uint64_t)pwrite(memories[i].fd, data + done, memories[i].size - done, (off_t)done);
            data += memories[i].size;
        }
    for (int i = 0; i < MOST; i++)
        if (mappings[i].range.size)
            mappings[i].data = map_memory(mappings[i].memory);
    return data;
}
