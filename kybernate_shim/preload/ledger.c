/* What the processes of a container have allocated, in a file on a tmpfs of the container's own.
 *
 * Each process has an entry with its own totals, which it alone writes, and adds up those of all. So a process that is
 * killed, or restored into another container, leaves no wrong sum: entries whose process is gone are cleared, and one
 * that has lost its entry takes another and writes down what it has. No process waits for another one.
 * Of two processes that ask for the rest at the same moment, both may be refused.
 */
#include "ledger.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "driver.h"
#include "versions.h"

enum { MOST_GPUS = 16, MOST_PROCESSES = 256, READ_AND_WRITE = 0666, STARTED = 22 /* field of /proc/PID/stat */ };
static const char VARIABLE[] = "KYBERNATE_VRAM"; /* the bytes, a colon, and the file; see oci/preload_spec.py */

struct entry {
    _Atomic int32_t pid; /* 0: unused; -1: being written */
    uint64_t started;    /* as the kernel counts it: a pid may be another process's later */
    _Atomic uint64_t bytes[MOST_GPUS];
};

struct ledger {
    _Atomic uint64_t gpus[MOST_GPUS]; /* of which GPU a column is, by its UUID; 0: unused */
    uint8_t rest[4096 - 8 * MOST_GPUS];
    struct entry entries[MOST_PROCESSES];
};

static size_t declared;
static struct ledger *ledger;
static struct ledger alone; /* where the file cannot be had: of this process */
static pthread_once_t opened = PTHREAD_ONCE_INIT;
static _Atomic uint64_t mine[MOST_GPUS];
static _Atomic(struct entry *) entry;
static atomic_flag taking = ATOMIC_FLAG_INIT;
static _Atomic uint8_t columns[MOST_DEVICES]; /* of each device, and one more; 0: not known */

static struct ledger *map_file(const char *path)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) {
        fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, READ_AND_WRITE);
        if (fd >= 0)
            fchmod(fd, READ_AND_WRITE); /* for other users of the container */
        else if (errno == EEXIST)
            fd = open(path, O_RDWR | O_CLOEXEC);
    }
    if (fd < 0)
        return &alone;
    void *found = ftruncate(fd, sizeof alone) == 0
                      ? mmap(NULL, sizeof alone, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
                      : MAP_FAILED;
    close(fd);
    return found == MAP_FAILED ? &alone : found;
}

/* The number at `*text`, which is left behind it. The C library's own need a newer version than containers have. */
static uint64_t number_at(const char **text)
{
    uint64_t value = 0;
    while (**text == ' ')
        ++*text;
    for (; **text >= '0' && **text <= '9'; ++*text)
        value = value * 10 + (uint64_t)(**text - '0');
    return value;
}

static void open_ledger(void)
{
    const char *path = getenv(VARIABLE);
    declared = path ? number_at(&path) : 0;
    if (declared)
        ledger = map_file(*path == ':' ? path + 1 : path);
}

size_t declared_bytes(void)
{
    pthread_once(&opened, open_ledger);
    return declared;
}

/* When a process has started, 0 where there is none. */
static uint64_t start_of(pid_t pid)
{
    char path[32], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    text[length > 0 ? length : 0] = 0;
    const char *at = strrchr(text, ')'); /* after the name, which may be anything */
    for (int field = 2; at && field < STARTED; field++)
        at = strchr(at + 1, ' ');
    return at ? number_at(&at) : 0;
}

static void clear(struct entry *it, int32_t pid)
{
    if (!atomic_compare_exchange_strong(&it->pid, &pid, -1))
        return;
    for (int i = 0; i < MOST_GPUS; i++)
        atomic_store(&it->bytes[i], 0);
    atomic_store(&it->pid, 0);
}

static void clear_dead(void)
{
    for (int i = 0; i < MOST_PROCESSES; i++) {
        struct entry *it = &ledger->entries[i];
        int32_t pid = atomic_load(&it->pid);
        if (pid > 0 && (kill(pid, 0) < 0 ? errno == ESRCH : start_of(pid) != it->started))
            clear(it, pid);
    }
}

static struct entry *take_entry(void)
{
    for (int i = 0; i < MOST_PROCESSES; i++) {
        int32_t none = 0;
        struct entry *it = &ledger->entries[i];
        if (!atomic_compare_exchange_strong(&it->pid, &none, -1))
            continue;
        it->started = start_of(getpid());
        for (int gpu = 0; gpu < MOST_GPUS; gpu++)
            atomic_store(&it->bytes[gpu], atomic_load(&mine[gpu]));
        atomic_store(&it->pid, getpid());
        return it;
    }
    return NULL;
}

/* Write down what this process has, in its entry; it may have been cleared, as after a restore. */
static void write_down(int column)
{
    while (atomic_flag_test_and_set_explicit(&taking, memory_order_acquire))
        sched_yield();
    struct entry *it = atomic_load(&entry);
    if (!it || atomic_load(&it->pid) != getpid()) {
        it = take_entry();
        if (!it) {
            clear_dead();
            it = take_entry();
        }
        atomic_store(&entry, it);
    }
    if (it)
        atomic_store(&it->bytes[column], atomic_load(&mine[column]));
    atomic_flag_clear_explicit(&taking, memory_order_release);
}

static uint64_t name_of(CUdevice device)
{
    unsigned char uuid[16] = {0};
    uint64_t hash = 0xcbf29ce484222325; /* FNV-1a */
    if (!driver()->uuid || driver()->uuid(uuid, device))
        uuid[0] = (unsigned char)(device + 1);
    for (size_t i = 0; i < sizeof uuid; i++)
        hash = (hash ^ uuid[i]) * 0x100000001b3;
    return hash ? hash : 1;
}

static int column_of(CUdevice device)
{
    if (columns[device])
        return columns[device] - 1;
    uint64_t name = name_of(device);
    for (int i = 0; i < MOST_GPUS; i++) {
        uint64_t seen = 0;
        if (atomic_compare_exchange_strong(&ledger->gpus[i], &seen, name) || seen == name) {
            columns[device] = (uint8_t)(i + 1);
            return i;
        }
    }
    return -1;
}

static size_t sum(int column)
{
    size_t total = 0, own = atomic_load(&mine[column]);
    for (int i = 0; i < MOST_PROCESSES; i++)
        if (atomic_load(&ledger->entries[i].pid) > 0 && &ledger->entries[i] != atomic_load(&entry))
            total += atomic_load(&ledger->entries[i].bytes[column]);
    return total + own;
}

bool ledger_add(CUdevice device, size_t size)
{
    int column = size <= declared ? column_of(device) : -1;
    if (column < 0)
        return size <= declared;
    atomic_fetch_add(&mine[column], size);
    write_down(column);
    if (sum(column) <= declared)
        return true;
    clear_dead();
    if (sum(column) <= declared)
        return true;
    ledger_remove(device, size);
    return false;
}

void ledger_remove(CUdevice device, size_t size)
{
    int column = column_of(device);
    if (column < 0)
        return;
    atomic_fetch_sub(&mine[column], size);
    write_down(column);
}

size_t ledger_sum(CUdevice device)
{
    int column = column_of(device);
    if (column < 0)
        return 0;
    if (sum(column) > 0)
        clear_dead();
    return sum(column);
}

void ledger_in_child(void)
{
    atomic_flag_clear(&taking);
    atomic_store(&entry, NULL);
    for (int i = 0; i < MOST_GPUS; i++)
        atomic_store(&mine[i], 0);
}
