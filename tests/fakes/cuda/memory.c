/* The program's device memory: on a pretended card, or moved out to the host. A test double: see abi.h.
 *
 * On the card, memory is a shared mapping of the process's file in held/. Beside it the process maps a TCP socket,
 * which CRIU refuses ("Can't find packet socket ... to mmap"), as it refuses the real driver's device mappings; unlike
 * a device it needs no permission, so that it works in any container.
 */
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "process.h"
#include "switches.h"
#include "virtual.h"

enum { MAX_ALLOCATIONS = 4096 };
static const uint64_t CONTEXT_BYTES = 8 << 20;         /* what a context costs on its card */
static const uint64_t GRAIN = 2 << 20;                 /* device memory comes in pieces of this size */
/* Where device addresses begin: no host addresses, so that a program that touches one crashes, as on a real card. */
#define DEVICE_BASE ((CUdeviceptr)0x6fca00000000)

struct allocation {
    CUdeviceptr address;
    uint64_t size; /* 0: this entry is free */
    int device;
    char *data; /* NULL for a context, whose bytes are only counted, and while on the host */
    bool is_context;
};

static struct allocation allocations[MAX_ALLOCATIONS];
static int allocation_count; /* entries ever used */
static CUdeviceptr next_address = DEVICE_BASE;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool managed;

static struct {
    int fd;
    char path[512];
    uint64_t end; /* of the file */
    struct account *account;
    void *socket_page;
} held = {.fd = -1};

static struct {
    char *data;
    uint64_t size;
} host_copy;

static CUresult hold_undumpable(void)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    held.socket_page = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, 0);
    close(fd); /* the mapping is enough; CRIU may have trouble of its own with the descriptor of a socket */
    if (held.socket_page == MAP_FAILED)
        return CUDA_ERROR_OPERATING_SYSTEM;
    madvise(held.socket_page, PAGE, MADV_DONTFORK);
    return CUDA_SUCCESS;
}

static void release_cards(void)
{
    release_devices();
    munmap(held.socket_page, PAGE);
    munmap(held.account, PAGE);
    unlink(held.path);
    close(held.fd);
    held.fd = -1;
}

CUresult hold_cards(void)
{
    held.fd = open_held(held.path, sizeof held.path);
    if (held.fd < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    held.end = PAGE;
    held.account = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, held.fd, 0);
    if (held.account == MAP_FAILED)
        return CUDA_ERROR_OPERATING_SYSTEM;
    madvise(held.account, PAGE, MADV_DONTFORK);
    return hold_devices() ? hold_undumpable() : CUDA_ERROR_OPERATING_SYSTEM;
}

static void bill(uint64_t bytes[MAX_CARDS], int device, uint64_t size)
{
    bytes[process.devices[device].place] += size;
}

static char *map_on_card(uint64_t size)
{
    if (ftruncate(held.fd, (off_t)(held.end + size)) < 0)
        return NULL;
    char *data = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, held.fd, (off_t)held.end);
    if (data == MAP_FAILED)
        return NULL;
    madvise(data, size, MADV_DONTFORK);
    held.end += size;
    return data;
}

static struct allocation *free_entry(void)
{
    for (int i = 0; i < allocation_count; i++)
        if (allocations[i].size == 0)
            return &allocations[i];
    return allocation_count < MAX_ALLOCATIONS ? &allocations[allocation_count++] : NULL;
}

static CUresult allocate(int device, uint64_t size, bool is_context, CUdeviceptr *address)
{
    struct machine machine;
    uint64_t bytes[MAX_CARDS] = {0};
    struct allocation *entry = free_entry();
    if (!entry || !read_machine(&machine))
        return CUDA_ERROR_OUT_OF_MEMORY;
    bill(bytes, device, size);
    if (!charge(&machine, held.account, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    char *data = is_context ? NULL : map_on_card(size);
    if (!data && !is_context) {
        discharge(held.account, bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *entry = (struct allocation){next_address, size, device, data, is_context};
    *address = next_address;
    next_address += size;
    return CUDA_SUCCESS;
}

static void release(struct allocation *entry)
{
    uint64_t bytes[MAX_CARDS] = {0};
    bill(bytes, entry->device, entry->size);
    if (entry->data) {
        madvise(entry->data, entry->size, MADV_REMOVE);
        munmap(entry->data, entry->size);
    }
    discharge(held.account, bytes);
    *entry = (struct allocation){0};
}

CUresult charge_bytes(int device, uint64_t size)
{
    struct machine machine;
    uint64_t bytes[MAX_CARDS] = {0};
    bill(bytes, device, size);
    return read_machine(&machine) && charge(&machine, held.account, bytes) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void discharge_bytes(int device, uint64_t size)
{
    uint64_t bytes[MAX_CARDS] = {0};
    bill(bytes, device, size);
    discharge(held.account, bytes);
}

CUresult charge_context(int device)
{
    CUdeviceptr ignored;
    pthread_mutex_lock(&lock);
    CUresult result = allocate(device, CONTEXT_BYTES, true, &ignored);
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

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size)
{
    CUresult result = enter();
    if (result)
        return result;
    pthread_mutex_lock(&lock);
    if (current_device() < 0)
        result = CUDA_ERROR_INVALID_CONTEXT;
    else if (size == 0)
        result = CUDA_ERROR_INVALID_VALUE;
    else
        result = allocate(current_device(), (size + GRAIN - 1) / GRAIN * GRAIN, false, address);
    pthread_mutex_unlock(&lock);
    leave();
    return result;
}

/* Managed memory shows from outside: the process maps as much of the device for unified memory. */
EXPORT CUresult cuMemAllocManaged(CUdeviceptr *address, size_t size, unsigned int flags)
{
    char path[512];
    (void)flags;
    CUresult result = cuMemAlloc_v2(address, size);
    state_path(path, sizeof path, "nvidia-uvm");
    int fd = result == CUDA_SUCCESS ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666) : -1;
    if (fd >= 0) {
        mmap(NULL, size, PROT_NONE, MAP_SHARED, fd, 0);
        close(fd);
    }
    managed = managed || result == CUDA_SUCCESS;
    return result;
}

int has_managed_memory(void)
{
    return managed;
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr address)
{
    CUresult result = enter();
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

void *translate(CUdeviceptr address, size_t size)
{
    void *found = NULL;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < allocation_count && !found && address >= DEVICE_BASE; i++) {
        const struct allocation *it = &allocations[i];
        if (it->data && address >= it->address && size <= it->size && address - it->address <= it->size - size)
            found = it->data + (address - it->address);
    }
    pthread_mutex_unlock(&lock);
    return found ? found : translate_virtual(address, size);
}

EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size)
{
    CUresult result = enter();
    if (result)
        return result;
    void *data = translate(to, size);
    if (data)
        memcpy(data, from, size);
    leave();
    return data ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size)
{
    CUresult result = enter();
    if (result)
        return result;
    const void *data = translate(from, size);
    if (data)
        memcpy(to, data, size);
    leave();
    return data ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemsetD8_v2(CUdeviceptr address, unsigned char value, size_t size)
{
    CUresult result = enter();
    if (result)
        return result;
    void *data = translate(address, size);
    if (data)
        memset(data, value, size);
    leave();
    return data ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemsetD32Async(CUdeviceptr address, unsigned int value, size_t count, CUstream stream)
{
    (void)stream;
    CUresult result = enter();
    if (result)
        return result;
    uint32_t *words = translate(address, count * sizeof *words);
    for (size_t i = 0; words && i < count; i++)
        words[i] = value;
    leave();
    return words ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static void take_time(uint64_t bytes)
{
    double seconds = seconds_per_gib() * (double)bytes / (1 << 30);
    struct timespec left = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    while (nanosleep(&left, &left) < 0 && errno == EINTR)
        ;
}

static uint64_t total_bytes(void)
{
    uint64_t total = 0;
    for (int i = 0; i < allocation_count; i++)
        total += allocations[i].size;
    return total;
}

/* Map memory for the host's copy by the call that the real driver makes. Pages around it that nobody may touch keep the
 * kernel from merging it with a neighbour; it takes the gap between them as the address that is wished for. */
static char *map_apart(uint64_t size)
{
    char *gap = mmap(NULL, size + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (gap == MAP_FAILED)
        return NULL;
    munmap(gap + PAGE, size);
    char *data = mmap(gap + PAGE, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (data != gap + PAGE) {
        munmap(gap, PAGE);
        munmap(gap + PAGE + size, PAGE);
        if (data != MAP_FAILED)
            munmap(data, size);
        return NULL;
    }
    return data;
}

CUresult move_to_host(void)
{
    static const int STAY[MAX_CARDS];
    uint64_t bytes[MAX_CARDS] = {0}, total = total_bytes() + virtual_bytes(bytes, STAY);
    char *data = total ? map_apart(total) : NULL;
    if (total && !data)
        return CUDA_ERROR_OUT_OF_MEMORY;
    take_time(total);
    host_copy.data = data;
    host_copy.size = total;
    for (int i = 0; i < allocation_count; data += allocations[i++].size)
        if (allocations[i].data) {
            memcpy(data, allocations[i].data, allocations[i].size);
            madvise(allocations[i].data, allocations[i].size, MADV_REMOVE); /* or both copies exist at once */
            munmap(allocations[i].data, allocations[i].size);
            allocations[i].data = NULL;
        }
    virtual_to_host(data);
    release_cards();
    return CUDA_SUCCESS;
}

static CUresult copy_to_cards(void)
{
    char *data = host_copy.data;
    for (int i = 0; i < allocation_count; data += allocations[i++].size)
        if (allocations[i].size && !allocations[i].is_context) {
            allocations[i].data = map_on_card(allocations[i].size);
            if (!allocations[i].data)
                return CUDA_ERROR_OPERATING_SYSTEM;
            memcpy(allocations[i].data, data, allocations[i].size);
            madvise(data, allocations[i].size, MADV_DONTNEED);
        }
    virtual_to_cards(data);
    return CUDA_SUCCESS;
}

CUresult move_to_cards(const struct machine *machine, const int moves[MAX_CARDS])
{
    uint64_t bytes[MAX_CARDS] = {0};
    CUresult result = hold_cards();
    if (result)
        return result;
    for (int i = 0; i < allocation_count; i++)
        if (allocations[i].size)
            bytes[moves[process.devices[allocations[i].device].place]] += allocations[i].size;
    virtual_bytes(bytes, moves);
    if (!charge(machine, held.account, bytes)) {
        release_cards();
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    take_time(host_copy.size);
    result = copy_to_cards();
    if (result == CUDA_SUCCESS && host_copy.data)
        munmap(host_copy.data - PAGE, host_copy.size + 2 * PAGE);
    host_copy.data = NULL;
    return result;
}
