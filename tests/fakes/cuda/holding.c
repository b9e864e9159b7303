/* What a process has on the GPUs: its file in held/, with the account and the memory of its allocations.
 *
 * On the GPU, memory is a shared mapping of that file. In addition the process maps a TCP socket, which CRIU refuses
 * ("Can't find packet socket ... to mmap"), as it refuses the real driver's device mappings; unlike a device it needs
 * no permission, so that it works in any container. The account stands for the semaphores that the real driver maps,
 * too: what polls the GPU reads there without a lock, and while the process is checkpointed the addresses are only
 * reserved. A test double: see abi.h.
 */
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "process.h"

static const uint64_t GRAIN = 2 << 20; /* allocations are whole ones, each at the beginning of a huge page */

static struct {
    int fd;
    char path[512];
    uint64_t end; /* of the file */
    struct account *account;
    void *socket_page;
} held = {.fd = -1};

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

void release_gpus(void)
{
    release_devices();
    munmap(held.socket_page, PAGE);
    mmap(held.account, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    unlink(held.path);
    close(held.fd);
    held.fd = -1;
}

CUresult hold_gpus(void)
{
    held.fd = open_held(held.path, sizeof held.path);
    if (held.fd < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    held.end = GRAIN;
    int flags = MAP_SHARED | (held.account ? MAP_FIXED : 0); /* where it was before a checkpoint */
    held.account = mmap(held.account, PAGE, PROT_READ | PROT_WRITE, flags, held.fd, 0);
    if (held.account == MAP_FAILED)
        return CUDA_ERROR_OPERATING_SYSTEM;
    madvise(held.account, PAGE, MADV_DONTFORK);
    return hold_devices() ? hold_undumpable() : CUDA_ERROR_OPERATING_SYSTEM;
}

CUresult read_semaphores(void)
{
    if (!process.started)
        return CUDA_ERROR_NOT_INITIALIZED;
    (void)*(volatile char *)held.account;
    return CUDA_SUCCESS;
}

/* A write for each huge page, from pages that are there: the kernel clears what one copy does not fill. */
static bool write_whole(const char *data, uint64_t size, uint64_t at)
{
    for (ssize_t n; size; data += n, at += (uint64_t)n, size -= (uint64_t)n) {
        uint64_t piece = size < GRAIN ? size : GRAIN;
        madvise((void *)((uintptr_t)data / PAGE * PAGE), piece, MADV_POPULATE_READ);
        if ((n = pwrite(held.fd, data, piece, (off_t)at)) <= 0)
            return false;
    }
    return true;
}

char *map_on_gpu(uint64_t size, const char *content)
{
    if (ftruncate(held.fd, (off_t)(held.end + size)) < 0 || (content && !write_whole(content, size, held.end)))
        return NULL;
    char *data = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, held.fd, (off_t)held.end);
    if (data == MAP_FAILED)
        return NULL;
    madvise(data, size, MADV_DONTFORK);
    madvise(data, size, MADV_HUGEPAGE); /* a GPU has no faults of small pages; where the directory's tmpfs allows it */
    held.end += size;
    return data;
}

CUresult charge_all(const struct machine *machine, const uint64_t bytes[MAX_GPUS])
{
    return charge(machine, held.account, bytes) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult charge_bytes(int device, uint64_t size)
{
    struct machine machine;
    uint64_t bytes[MAX_GPUS] = {0};
    bytes[process.devices[device].place] = size;
    return read_machine(&machine) ? charge_all(&machine, bytes) : CUDA_ERROR_OUT_OF_MEMORY;
}

void discharge_bytes(int device, uint64_t size)
{
    uint64_t bytes[MAX_GPUS] = {0};
    bytes[process.devices[device].place] = size;
    discharge(held.account, bytes);
}
