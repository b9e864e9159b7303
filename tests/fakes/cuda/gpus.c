/* Reads the state directory and keeps the accounts of the pretended GPUs. A test double: see abi.h. */
#include "gpus.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static const uint64_t ACCOUNT_MAGIC = 0x46414b4544415256; /* "VRADEKAF": a file that is still being made has it not */

void state_path(char *path, size_t size, const char *name)
{
    const char *directory = getenv("FAKE_CUDA_DIR");
    snprintf(path, size, "%s/%s", directory && *directory ? directory : "/run/fake-cuda", name);
}

bool read_state(const char *name, char *text, size_t size)
{
    char path[512];
    state_path(path, sizeof path, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t n = read(fd, text, size - 1);
    close(fd);
    text[n > 0 ? n : 0] = '\0';
    return n > 0;
}

/* Parse "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx". */
static bool parse_uuid(const char *text, CUuuid *uuid)
{
    int nibbles = 0;
    if (strncmp(text, "GPU-", 4) == 0)
        text += 4;
    memset(uuid, 0, sizeof *uuid);
    for (; *text && nibbles < 32; text++) {
        int value = *text >= '0' && *text <= '9' ? *text - '0' : *text >= 'a' && *text <= 'f' ? *text - 'a' + 10 : -1;
        if (*text == '-')
            continue;
        if (value < 0)
            return false;
        uuid->bytes[nibbles / 2] |= (unsigned char)(value << (nibbles % 2 ? 0 : 4));
        nibbles++;
    }
    return nibbles == 32;
}

bool read_machine(struct machine *machine)
{
    char text[4096], *rest = text, *line;
    machine->count = 0;
    if (!read_state("gpus", text, sizeof text))
        return false;
    while ((line = strsep(&rest, "\n")) && machine->count < MAX_GPUS) {
        struct gpu *gpu = &machine->gpus[machine->count];
        char uuid[64];
        if (sscanf(line, "%63s %" SCNu64 " %63[^\n]", uuid, &gpu->bytes, gpu->model) == 3 &&
            parse_uuid(uuid, &gpu->uuid))
            machine->count++;
    }
    return machine->count > 0;
}

void read_driver(int *api, char *version, size_t size)
{
    char text[64], release[32] = "580.159.04";
    *api = 13000;
    if (read_state("driver", text, sizeof text))
        sscanf(text, "%d %31s", api, release);
    snprintf(version, size, "%s", release);
}

static int lock_accounts(void)
{
    char path[512];
    state_path(path, sizeof path, "lock");
    int fd = open(path, O_RDONLY | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0)
        return fd;
    fchmod(fd, 0666); /* programs of all users open it, and the umask of the first one may forbid that */
    while (flock(fd, LOCK_EX) < 0 && errno == EINTR)
        ;
    return fd;
}

int open_held(char *path, size_t size)
{
    int accounts = lock_accounts(); /* or a concurrent count takes the file that is not yet locked for a dead one's */
    state_path(path, size, "held");
    mkdir(path, 0777);
    state_path(path, size, "held/XXXXXX");
    int fd = mkostemp(path, O_CLOEXEC);
    if (fd >= 0) {
        struct account empty = {.magic = ACCOUNT_MAGIC};
        if (flock(fd, LOCK_EX | LOCK_NB) < 0 || ftruncate(fd, PAGE) < 0 ||
            pwrite(fd, &empty, sizeof empty, 0) != sizeof empty) {
            unlink(path);
            close(fd);
            fd = -1;
        }
    }
    if (accounts >= 0)
        close(accounts);
    return fd;
}

/* Add up every account; unlink those whose owner is dead. Call it with the accounts locked. */
static void add_up(uint64_t used[MAX_GPUS])
{
    char path[512];
    state_path(path, sizeof path, "held");
    memset(used, 0, MAX_GPUS * sizeof *used);
    DIR *directory = opendir(path);
    if (!directory)
        return;
    for (struct dirent *entry; (entry = readdir(directory));) {
        struct account account;
        int fd = entry->d_name[0] == '.' ? -1 : openat(dirfd(directory), entry->d_name, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            continue;
        if (flock(fd, LOCK_SH | LOCK_NB) == 0)
            unlinkat(dirfd(directory), entry->d_name, 0);
        else if (pread(fd, &account, sizeof account, 0) == sizeof account && account.magic == ACCOUNT_MAGIC)
            for (int i = 0; i < MAX_GPUS; i++)
                used[i] += account.bytes[i];
        close(fd);
    }
    closedir(directory);
}

void used_bytes(uint64_t used[MAX_GPUS])
{
    int accounts = lock_accounts();
    add_up(used);
    if (accounts >= 0)
        close(accounts);
}

bool charge(const struct machine *machine, struct account *mine, const uint64_t bytes[MAX_GPUS])
{
    uint64_t used[MAX_GPUS];
    int accounts = lock_accounts();
    bool fits = true;
    add_up(used);
    for (int i = 0; i < MAX_GPUS && fits; i++)
        fits = bytes[i] == 0 || (i < machine->count && used[i] + bytes[i] <= machine->gpus[i].bytes);
    for (int i = 0; i < MAX_GPUS && fits; i++)
        mine->bytes[i] += bytes[i];
    if (accounts >= 0)
        close(accounts);
    return fits;
}

void discharge(struct account *mine, const uint64_t bytes[MAX_GPUS])
{
    int accounts = lock_accounts();
    for (int i = 0; i < MAX_GPUS; i++)
        mine->bytes[i] -= bytes[i];
    if (accounts >= 0)
        close(accounts);
}
