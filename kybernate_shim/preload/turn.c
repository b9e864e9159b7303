/* A program waits here before its first call of the driver, as long as it is not the turn of its container's seat.
 *
 * The driver locks only processes that have called it. One that first calls it after the turn of its seat is over could be
 * held by nothing else, and would use a GPU that another container has now.
 *
 * The node's file says whose turn it is, and the container can only read it: empty, it is the turn of the container's
 * seat. Otherwise it says what to do while the node's agent is away, "start", or "wait" and for how many seconds. The
 * agent has a lock on the file as long as it lives, and takes a read(2) of it for a use of the GPU. So it is read once,
 * and again after each change, such as by a new run of the agent; nothing is left open or locked in between, which a
 * checkpoint would have to carry along. agent/seats/turn_files.py is the other side.
 */
#include "turn.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "driver.h"
#include "versions.h"

#define EXPORT __attribute__((visibility("default")))

enum { GET_LOCK = 5 /* F_GETLK */, LONGEST = 16, SECOND = 1000000000 };
static const char VARIABLE[] = "KYBERNATE_TURN"; /* the file; see oci/preload_spec.py */
static const struct timespec PAUSE = {0, 20000000};

/* What a thread that waits knows of the file. */
struct turn {
    struct timespec changed;
    bool waits;        /* for an agent that is away */
    uint64_t patience; /* nanoseconds */
    uint64_t away;     /* since when it is, of CLOCK_MONOTONIC; 0: it is there */
};

static const char *file;
static pthread_once_t named = PTHREAD_ONCE_INIT;
static _Atomic bool begun; /* the driver knows the process, and can lock it */

static void find_file(void)
{
    const char *path = getenv(VARIABLE);
    file = path && *path ? strdup(path) : NULL;
}

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * SECOND + (uint64_t)time.tv_nsec;
}

static void read_policy(struct turn *turn, int fd)
{
    char text[LONGEST + 1] = "";
    ssize_t length = pread(fd, text, LONGEST, 0);
    text[length > 0 ? length : 0] = 0;
    turn->waits = strncmp(text, "wait ", 5) == 0;
    turn->patience = 0;
    for (const char *at = text + 5; turn->waits && *at >= '0' && *at <= '9'; at++)
        turn->patience = turn->patience * 10 + (uint64_t)(*at - '0') * SECOND;
}

static bool agent_is_there(int fd)
{
    struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET};
    return syscall(SYS_fcntl, fd, GET_LOCK, &lock) == 0 && lock.l_type != F_UNLCK;
}

/* Whether the program has to wait on. Calls by number: the C library's own are newer than those in containers. */
static bool is_before(struct turn *turn, int fd)
{
    struct stat found;
    if (syscall(SYS_fstat, fd, &found) || found.st_size == 0)
        return false;
    if (found.st_mtim.tv_sec != turn->changed.tv_sec || found.st_mtim.tv_nsec != turn->changed.tv_nsec) {
        turn->changed = found.st_mtim;
        read_policy(turn, fd);
    }
    if (agent_is_there(fd))
        turn->away = 0;
    else if (!turn->away)
        turn->away = now();
    return !turn->away || turn->waits;
}

static bool is_too_long(const struct turn *turn)
{
    return turn->away && now() - turn->away >= turn->patience;
}

CUresult await_turn(void)
{
    struct turn turn = {.waits = false};
    int error = errno;
    CUresult result = CUDA_SUCCESS;
    pthread_once(&named, find_file);
    while (file && result == CUDA_SUCCESS) {
        int fd = open(file, O_RDONLY | O_CLOEXEC);
        bool before = fd >= 0 && is_before(&turn, fd);
        if (fd >= 0)
            close(fd);
        if (!before)
            break;
        if (is_too_long(&turn))
            result = CUDA_ERROR_SYSTEM_NOT_READY;
        else
            nanosleep(&PAUSE, NULL);
    }
    errno = error;
    return result;
}

EXPORT CUresult cuInit(unsigned int flags);

/* Asked a second time, when the driver knows the process: if its turn has ended meanwhile, neither did a suspend find
 * it, nor has it taken memory yet. */
EXPORT CUresult cuInit(unsigned int flags)
{
    CUresult result = begun ? CUDA_SUCCESS : await_turn();
    if (result == CUDA_SUCCESS)
        result = driver()->init ? driver()->init(flags) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS && !begun) {
        result = await_turn();
        begun = result == CUDA_SUCCESS;
    }
    return result;
}
