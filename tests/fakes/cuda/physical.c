/* Memory that a program makes by itself, handed out and taken in by handles. A test double: see abi.h.
 *
 * Memory is a memfd, so that a descriptor of it can be handed to another process, and is the same memory there; and so
 * that it can be mapped more than once. What was measured with driver 580.159.04 on an H100: exportable memory is
 * checkpointed and restored like any other, also after it was exported and the importer has released it.
 */
#include "physical.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "switches.h"

enum { POSIX_FD = 1, MAGIC = 0x7700 };
enum { CHUNK = 64 << 10 }; /* of zeros, which are not written */

static struct memory memories[MOST_VIRTUAL];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct counted calls;

CUresult begin_virtual_function(const char *name)
{
    CUresult result = enter_function(name);
    if (result)
        return result;
    pthread_mutex_lock(&lock);
    const char *switches = getenv("FAKE_CUDA_FAIL");
    count(&calls);
    struct switched what = switched_counted(switches ? switches : "", "vmm", calls, getpid());
    if (what.action != ERROR) {
        act_before(what);
        return CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    leave();
    return what.error;
}

CUresult end_virtual(CUresult result)
{
    pthread_mutex_unlock(&lock);
    leave();
    return result;
}

struct memory *by_handle(uint64_t handle)
{
    uint64_t index = handle - MAGIC;
    return index < MOST_VIRTUAL && memories[index].references ? &memories[index] : NULL;
}

uint64_t handle_of(const struct memory *memory)
{
    return (uint64_t)(memory - memories) + MAGIC;
}

void drop_reference(struct memory *memory)
{
    if (--memory->references)
        return;
    close(memory->fd);
    if (!memory->imported)
        discharge_bytes(memory->device, memory->size);
}

static struct memory *new_memory(int fd, uint64_t size, int device, int handle_types, bool imported)
{
    for (int i = 0; i < MOST_VIRTUAL && fd >= 0; i++)
        if (!memories[i].references) {
            memories[i] = (struct memory){1, fd, device, handle_types, imported, size};
            return &memories[i];
        }
    if (fd >= 0)
        close(fd);
    return NULL;
}

/* The GPU's number is kept in the name of the memfd: an importer asks for the properties. Where the machine has a
 * directory vram/, memory is a file there instead, and of huge pages if its tmpfs allows that, as memfds seldom are. */
static int new_memfd(int place, uint64_t size)
{
    char name[32], path[512], unique[64];
    snprintf(name, sizeof name, "fake-vram-%02d", place);
    snprintf(unique, sizeof unique, "vram/%s-XXXXXX", name);
    state_path(path, sizeof path, unique);
    int fd = mkostemp(path, O_CLOEXEC);
    if (fd >= 0)
        unlink(path);
    else
        fd = (int)syscall(SYS_memfd_create, name, 1);
    if (fd >= 0 && ftruncate(fd, (off_t)size) < 0) {
        close(fd);
        fd = -1;
    }
    return fd;
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *wanted, int option)
{
    (void)wanted, (void)option;
    *size = VIRTUAL_GRAIN;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemCreate(uint64_t *handle, size_t size, const CUmemAllocationProp *wanted, unsigned long long flags)
{
    CUresult result = begin_virtual();
    if (result)
        return result;
    int device = wanted->location.id;
    if (flags || !size || size % VIRTUAL_GRAIN || wanted->type != 1 || wanted->location.type != 1)
        return end_virtual(CUDA_ERROR_INVALID_VALUE);
    if (device < 0 || device >= process.count)
        return end_virtual(CUDA_ERROR_INVALID_DEVICE);
    result = charge_bytes(device, size);
    if (result)
        return end_virtual(result);
    int fd = new_memfd(process.devices[device].place, size);
    struct memory *made = new_memory(fd, size, device, wanted->handle_types, false);
    if (!made) {
        discharge_bytes(device, size);
        return end_virtual(CUDA_ERROR_OUT_OF_MEMORY);
    }
    *handle = handle_of(made);
    return end_virtual(CUDA_SUCCESS);
}

EXPORT CUresult cuMemRelease(uint64_t handle)
{
    CUresult result = begin_virtual();
    if (result)
        return result;
    struct memory *memory = by_handle(handle);
    if (memory)
        drop_reference(memory);
    return end_virtual(memory ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

EXPORT CUresult cuMemExportToShareableHandle(void *shared, uint64_t handle, int type, unsigned long long flags)
{
    CUresult result = begin_virtual();
    if (result)
        return result;
    struct memory *memory = by_handle(handle);
    if (!memory || flags || type != POSIX_FD || !(memory->handle_types & POSIX_FD))
        return end_virtual(CUDA_ERROR_INVALID_VALUE);
    int fd = dup(memory->fd);
    if (fd < 0)
        return end_virtual(CUDA_ERROR_OPERATING_SYSTEM);
    *(int *)shared = fd;
    return end_virtual(CUDA_SUCCESS);
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
    CUresult result = begin_virtual();
    if (result)
        return result;
    int fd = type == POSIX_FD ? dup((int)(intptr_t)shared) : -1;
    if (fd < 0 || fstat(fd, &about) < 0 || device_of(fd) < 0) {
        if (fd >= 0)
            close(fd);
        return end_virtual(CUDA_ERROR_INVALID_VALUE);
    }
    struct memory *made = new_memory(fd, (uint64_t)about.st_size, device_of(fd), POSIX_FD, true);
    if (made)
        *handle = handle_of(made);
    return end_virtual(made ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *found, uint64_t handle)
{
    CUresult result = begin_virtual();
    if (result)
        return result;
    const struct memory *memory = by_handle(handle);
    if (!memory)
        return end_virtual(CUDA_ERROR_INVALID_VALUE);
    *found = (CUmemAllocationProp){.type = 1, .handle_types = memory->handle_types, .location = {1, memory->device}};
    return end_virtual(CUDA_SUCCESS);
}

uint64_t physical_bytes(uint64_t bytes[MAX_GPUS], const int moves[MAX_GPUS])
{
    uint64_t total = 0;
    for (int i = 0; i < MOST_VIRTUAL; i++)
        if (memories[i].references && !memories[i].imported) {
            bytes[moves[process.devices[memories[i].device].place]] += memories[i].size;
            total += memories[i].size;
        }
    return total;
}

/* What was never written takes no room in a memfd, and none of this copy's time. */
static void read_all(const struct memory *memory, char *data)
{
    off_t at = 0, end;
    for (; (at = lseek(memory->fd, at, SEEK_DATA)) >= 0; at = end) {
        end = lseek(memory->fd, at, SEEK_HOLE);
        for (ssize_t n = 0; at < end; at += n)
            if ((n = pread(memory->fd, data + at, (size_t)(end - at), at)) <= 0)
                return;
    }
}

static bool write_all(const struct memory *memory, const char *data)
{
    static const char ZEROS[CHUNK];
    for (uint64_t at = 0; at < memory->size; at += CHUNK)
        if (memcmp(data + at, ZEROS, CHUNK) != 0 && pwrite(memory->fd, data + at, CHUNK, (off_t)at) != CHUNK)
            return false;
    return true;
}

char *physical_to_host(char *data)
{
    for (int i = 0; i < MOST_VIRTUAL; i++)
        if (memories[i].references && !memories[i].imported) {
            read_all(&memories[i], data);
            data += memories[i].size;
            close(memories[i].fd);
            memories[i].fd = -1;
        }
    return data;
}

char *physical_to_gpus(char *data)
{
    for (int i = 0; i < MOST_VIRTUAL; i++)
        if (memories[i].references && !memories[i].imported) {
            memories[i].fd = new_memfd(process.devices[memories[i].device].place, memories[i].size);
            if (memories[i].fd < 0 || !write_all(&memories[i], data))
                return NULL;
            data += memories[i].size;
        }
    return data;
}
