/* A pretended libnvidia-ml.so.1: what can be asked of a GPU without a CUDA context. A test double: see abi.h. */
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "gpus.h"

enum { NVML_SUCCESS = 0, NVML_ERROR_INVALID_ARGUMENT = 2, NVML_ERROR_NOT_SUPPORTED = 3, NVML_ERROR_NOT_FOUND = 6 };
enum { NVML_ERROR_DRIVER_NOT_LOADED = 9, NVML_ERROR_OPERATING_SYSTEM = 17 };

struct memory {
    unsigned long long total, free, used;
};

/* In a process that computes, the driver's lock keeps NVML's calls waiting, too. As measured with driver 580.159.04, a
 * call reads a lock of the C library that is written meanwhile, with the habits of the gate (see gate.c). */
static pthread_rwlock_t gate = PTHREAD_RWLOCK_INITIALIZER;

EXPORT bool fake_nvml_shut(const struct timespec *until)
{
    return (until ? pthread_rwlock_timedwrlock(&gate, until) : pthread_rwlock_wrlock(&gate)) == 0;
}

EXPORT void fake_nvml_open(void)
{
    pthread_rwlock_unlock(&gate);
}

static void pass(void)
{
    pthread_rwlock_rdlock(&gate);
    pthread_rwlock_unlock(&gate);
}

/* Of the processes of a cgroup, in bytes. */
struct limits {
    const char *cgroup;
    unsigned long long soft, hard;
};

/* A handle is the GPU's index plus one: opaque, and never NULL. */
typedef uintptr_t handle;

static int gpu_at(handle device, struct gpu *gpu)
{
    struct machine machine;
    if (!read_machine(&machine) || device < 1 || device > (handle)machine.count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *gpu = machine.gpus[device - 1];
    return NVML_SUCCESS;
}

EXPORT int nvmlInit_v2(void)
{
    pass();
    struct machine machine;
    return read_machine(&machine) ? NVML_SUCCESS : NVML_ERROR_DRIVER_NOT_LOADED;
}

EXPORT int nvmlShutdown(void)
{
    pass();
    return NVML_SUCCESS;
}

EXPORT int nvmlSystemGetDriverVersion(char *version, unsigned int size)
{
    pass();
    int api;
    read_driver(&api, version, size);
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetCount_v2(unsigned int *count)
{
    pass();
    struct machine machine;
    *count = read_machine(&machine) ? (unsigned int)machine.count : 0;
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned int index, handle *device)
{
    pass();
    struct gpu gpu;
    *device = index + 1;
    return gpu_at(*device, &gpu);
}

static void format_uuid(const CUuuid *uuid, char *text, size_t size)
{
    size_t at = (size_t)snprintf(text, size, "GPU-");
    for (int i = 0; i < 16 && at < size; i++)
        at += (size_t)snprintf(text + at, size - at, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x",
                               uuid->bytes[i]);
}

EXPORT int nvmlDeviceGetUUID(handle device, char *uuid, unsigned int size)
{
    pass();
    struct gpu gpu;
    int result = gpu_at(device, &gpu);
    if (result == NVML_SUCCESS)
        format_uuid(&gpu.uuid, uuid, size);
    return result;
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, handle *device)
{
    pass();
    char text[64];
    struct gpu gpu;
    for (*device = 1; gpu_at(*device, &gpu) == NVML_SUCCESS; ++*device) {
        format_uuid(&gpu.uuid, text, sizeof text);
        if (strcmp(text, uuid) == 0)
            return NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
}

EXPORT int nvmlDeviceGetName(handle device, char *name, unsigned int size)
{
    pass();
    struct gpu gpu;
    int result = gpu_at(device, &gpu);
    if (result == NVML_SUCCESS)
        snprintf(name, size, "%s", gpu.model);
    return result;
}

EXPORT int nvmlDeviceGetMemoryInfo(handle device, struct memory *memory)
{
    pass();
    struct gpu gpu;
    uint64_t used[MAX_GPUS];
    int result = gpu_at(device, &gpu);
    if (result == NVML_SUCCESS) {
        used_bytes(used);
        *memory = (struct memory){gpu.bytes, gpu.bytes - used[device - 1], used[device - 1]};
    }
    return result;
}

/* The state directory's file `mig` switches the mode on for every GPU, as a pre-flight check has to refuse it. */
EXPORT int nvmlDeviceGetMigMode(handle device, unsigned int *current, unsigned int *pending)
{
    pass();
    char text[8];
    struct gpu gpu;
    *current = *pending = read_state("mig", text, sizeof text) && text[0] == '1';
    return gpu_at(device, &gpu);
}

EXPORT int nvmlDeviceGetMinorNumber(handle device, unsigned int *number)
{
    pass();
    struct gpu gpu;
    *number = (unsigned int)device - 1;
    return gpu_at(device, &gpu);
}

EXPORT int nvmlDeviceGetMaxMigDeviceCount(handle device, unsigned int *count)
{
    pass();
    struct gpu gpu;
    *count = 0;
    return gpu_at(device, &gpu);
}

struct pci_place {
    char short_text[16];
    unsigned int domain, bus, device, model, subsystem;
    char text[32];
};

/* Each GPU on a bus that no machine has, so that nothing is found below the kernel's directories of it. */
EXPORT int nvmlDeviceGetPciInfo_v3(handle device, struct pci_place *place)
{
    pass();
    struct gpu gpu;
    int result = gpu_at(device, &gpu);
    *place = (struct pci_place){.domain = 0xfa4e, .bus = (unsigned int)device};
    snprintf(place->short_text, sizeof place->short_text, "%04x:%02x:00.0", place->domain, place->bus);
    snprintf(place->text, sizeof place->text, "%08x:%02x:00.0", place->domain, place->bus);
    return result;
}

enum { LEVEL_SYSTEM = 50, MOST_LINKS = 18 };

/* The state directory's file `topology` has lines of two GPUs and how they are connected: NV and a number, PIX, PXB, PHB,
 * NODE. Without a line, they are as far apart as can be. */
static bool find_path(unsigned int one, unsigned int other, char path[8])
{
    char text[4096], *line, *rest = text;
    if (!read_state("topology", text, sizeof text))
        return false;
    while ((line = strsep(&rest, "\n"))) {
        unsigned int a, b;
        if (sscanf(line, "%u %u %7s", &a, &b, path) == 3 && ((a == one && b == other) || (a == other && b == one)))
            return true;
    }
    return false;
}

EXPORT int nvmlDeviceGetTopologyCommonAncestor(handle one, handle other, int *level)
{
    pass();
    static const struct {
        const char *path;
        int level;
    } LEVELS[] = {{"PIX", 10}, {"PXB", 20}, {"PHB", 30}, {"NODE", 40}};
    char path[8];
    *level = LEVEL_SYSTEM;
    if (find_path((unsigned int)one - 1, (unsigned int)other - 1, path))
        for (size_t i = 0; i < sizeof LEVELS / sizeof *LEVELS; i++)
            if (strcmp(path, LEVELS[i].path) == 0)
                *level = LEVELS[i].level;
    return NVML_SUCCESS;
}

/* Which GPU a link leads to, -1: none. The links to the first one come first. */
static int end_of_link(handle device, unsigned int link)
{
    struct machine machine;
    char path[8];
    for (int other = 0; read_machine(&machine) && other < machine.count; other++) {
        unsigned int links;
        if (!find_path((unsigned int)device - 1, (unsigned int)other, path) || sscanf(path, "NV%u", &links) != 1)
            continue;
        if (link < links)
            return other;
        link -= links;
    }
    return -1;
}

EXPORT int nvmlDeviceGetNvLinkState(handle device, unsigned int link, unsigned int *up)
{
    pass();
    *up = end_of_link(device, link) >= 0;
    return link < MOST_LINKS ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(handle device, unsigned int link, struct pci_place *place)
{
    pass();
    int other = end_of_link(device, link);
    return other < 0 ? NVML_ERROR_NOT_SUPPORTED : nvmlDeviceGetPciInfo_v3((handle)other + 1, place);
}

struct holder {
    unsigned int pid;
    unsigned long long bytes;
    unsigned int gpu_instance, compute_instance;
};

/* The kernel shows who holds the lock of a file in held/, by pids of this namespace. */
static unsigned int named_owner(const struct stat *file)
{
    char line[256];
    unsigned int found = 0;
    FILE *locks = fopen("/proc/locks", "re");
    while (locks && !found && fgets(line, sizeof line, locks)) {
        unsigned int pid, high, low;
        unsigned long inode;
        if (sscanf(line, "%*s FLOCK ADVISORY WRITE %u %x:%x:%lu", &pid, &high, &low, &inode) == 4 &&
            inode == file->st_ino && makedev(high, low) == file->st_dev)
            found = pid;
    }
    if (locks)
        fclose(locks);
    return found;
}

/* The kernel gives that list by the page and counts its lines: where a lock is let go between two pages, as that of the
 * accounts is all the time, the second page leaves out a line. So who is not named is looked for again. */
static unsigned int owner(const struct stat *file)
{
    unsigned int found = 0;
    for (int again = 0; again < 20 && !found; again++)
        found = named_owner(file);
    return found;
}

/* The state directory's file `hidden` makes it name no process, as in a container or on a virtual GPU. */
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(handle device, unsigned int *count, struct holder *holders)
{
    pass();
    char path[512], text[8];
    struct gpu gpu;
    unsigned int room = *count;
    int result = gpu_at(device, &gpu);
    state_path(path, sizeof path, "held");
    bool hidden = read_state("hidden", text, sizeof text);
    DIR *directory = result == NVML_SUCCESS && !hidden ? opendir(path) : NULL;
    *count = 0;
    for (struct dirent *entry; directory && *count < room && (entry = readdir(directory));) {
        struct account account;
        struct stat file;
        unsigned int pid;
        int fd = entry->d_name[0] == '.' ? -1 : openat(dirfd(directory), entry->d_name, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            continue;
        if (pread(fd, &account, sizeof account, 0) == sizeof account && account.bytes[device - 1] &&
            fstat(fd, &file) == 0 && (pid = owner(&file)))
            holders[(*count)++] = (struct holder){pid, account.bytes[device - 1], 0, 0};
        close(fd);
    }
    if (directory)
        closedir(directory);
    return result;
}

struct sample {
    unsigned int pid;
    unsigned long long microseconds;
    unsigned int multiprocessors, memory, encoder, decoder;
};

/* The state directory's file `load` has lines of a pid, microseconds and a percentage, for every GPU. As NVML does, it
 * answers with one sample for each process: what it used since `since`, with the time of the newest sample of all; that
 * nothing is found where there is no sample; and takes none in MIG mode. */
EXPORT int nvmlDeviceGetProcessUtilization(handle device, struct sample *samples, unsigned int *count,
                                           unsigned long long since)
{
    pass();
    char text[4096], *line, *rest = text;
    struct gpu gpu;
    unsigned int room = *count, current, pending;
    int result = nvmlDeviceGetMigMode(device, &current, &pending);
    *count = 0;
    if (result != NVML_SUCCESS)
        return result;
    if (current || gpu_at(device, &gpu) != NVML_SUCCESS)
        return NVML_ERROR_NOT_SUPPORTED;
    if (!read_state("load", text, sizeof text))
        return NVML_ERROR_NOT_FOUND;
    unsigned long long newest = 0;
    while ((line = strsep(&rest, "\n"))) {
        struct sample one = {0};
        unsigned int known = 0;
        if (sscanf(line, "%u %llu %u", &one.pid, &one.microseconds, &one.multiprocessors) != 3 ||
            one.microseconds <= since)
            continue;
        if (one.microseconds > newest)
            newest = one.microseconds;
        while (known < *count && samples[known].pid != one.pid)
            known++;
        if (known == room)
            continue;
        if (known == *count)
            samples[(*count)++] = one;
        else if (one.multiprocessors > samples[known].multiprocessors)
            samples[known].multiprocessors = one.multiprocessors;
    }
    for (unsigned int index = 0; index < *count; index++)
        samples[index].microseconds = newest;
    return *count ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

EXPORT int nvmlDeviceGetPersistenceMode(handle device, unsigned int *mode)
{
    pass();
    struct gpu gpu;
    *mode = 1;
    return gpu_at(device, &gpu);
}

/* Adds a line to the state directory's file `limits`: UUID, cgroup, soft limit, hard limit. Nothing else comes of it. */
EXPORT int nvmlDeviceSetMemoryLimits_v1(handle device, const struct limits *limits)
{
    pass();
    struct gpu gpu;
    struct stat directory;
    char uuid[64], path[512];
    int result = gpu_at(device, &gpu);
    if (result != NVML_SUCCESS)
        return result;
    if (limits->soft > limits->hard)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (stat(limits->cgroup, &directory) != 0)
        return NVML_ERROR_OPERATING_SYSTEM;
    format_uuid(&gpu.uuid, uuid, sizeof uuid);
    state_path(path, sizeof path, "limits");
    FILE *file = fopen(path, "ae");
    if (!file)
        return NVML_ERROR_OPERATING_SYSTEM;
    fprintf(file, "%s %s %llu %llu\n", uuid, limits->cgroup, limits->soft, limits->hard);
    fclose(file);
    return NVML_SUCCESS;
}

EXPORT const char *nvmlErrorString(int result)
{
    switch (result) {
    case NVML_SUCCESS:
        return "Success";
    case NVML_ERROR_INVALID_ARGUMENT:
        return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED:
        return "Not Supported";
    case NVML_ERROR_NOT_FOUND:
        return "Not Found";
    case NVML_ERROR_DRIVER_NOT_LOADED:
        return "Driver Not Loaded";
    default:
        return "Unknown Error";
    }
}
