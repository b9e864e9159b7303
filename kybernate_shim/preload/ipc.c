/* CUDA IPC of memory that we have made, as torch.multiprocessing and others share tensors.
 *
 * Legacy IPC names the driver's own allocations, which ours are not. So a handle of ours names a socket of this process
 * and a block: another process with this library connects to it, gets a descriptor of the block's memory, and maps that.
 * The block stays out of the arena from then on, and what was opened counts as imported: the process that has it is not
 * suspended. A handle of other memory is the driver's.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "blocks.h"
#include "driver.h"
#include "exports.h"
#include "versions.h"

#define EXPORT __attribute__((visibility("default")))

static const char MAGIC[8] = "kyb-ipc", PLACE[] = "kybernate-ipc-";
enum { TOKEN = 32, MOST_OPENED = 1024, SECONDS = 10, WAITING = 64 };

/* CUipcMemHandle, which is passed by value; what ours says. */
typedef struct {
    char reserved[64];
} CUipcMemHandle;

struct name {
    char magic[sizeof MAGIC], token[TOKEN];
    CUhandle block;
    uint64_t size;
};

_Static_assert(sizeof(struct name) <= sizeof(CUipcMemHandle), "a handle has room for a name");

EXPORT CUresult cuIpcGetMemHandle(void *handle, CUdeviceptr address);
EXPORT CUresult cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags);
EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags);
EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr address);
extern CUresult cuMemImportFromShareableHandle(CUhandle *handle, void *shared, int type);
extern CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUhandle handle, unsigned long long flags);
extern CUresult cuMemUnmap(CUdeviceptr address, size_t size);
extern CUresult cuMemRelease(CUhandle handle);

static char token[TOKEN]; /* of this process's socket, in hex digits: only a process that had a handle knows it */
static pthread_mutex_t beginning = PTHREAD_MUTEX_INITIALIZER;
static pid_t serving; /* the process that has begun to; a child of fork(2) begins again */

static struct opened {
    CUdeviceptr address;
    size_t size; /* 0: unused */
} opened[MOST_OPENED];

static socklen_t place_of(const char *of, struct sockaddr_un *place)
{
    *place = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(place->sun_path + 1, PLACE, sizeof PLACE - 1);
    memcpy(place->sun_path + sizeof PLACE, of, TOKEN);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + sizeof PLACE + TOKEN);
}

static void bound(int fd)
{
    const struct timeval most = {SECONDS, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &most, sizeof most);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &most, sizeof most);
}

/* One message with a descriptor, or with none where there is an error. */
static void send_descriptor(int connection, CUresult result, int fd)
{
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct iovec data = {&result, sizeof result};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1};
    if (result == CUDA_SUCCESS) {
        message.msg_control = &control;
        message.msg_controllen = sizeof control.room;
        control.header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof fd), .cmsg_level = SOL_SOCKET};
        control.header.cmsg_type = SCM_RIGHTS;
        memcpy(CMSG_DATA(&control.header), &fd, sizeof fd);
    }
    sendmsg(connection, &message, MSG_NOSIGNAL);
}

static CUresult receive_descriptor(int connection, int *fd)
{
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof(int))];
    } control = {0};
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    struct iovec data = {&result, sizeof result};
    struct msghdr message = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control.room};
    if (recvmsg(connection, &message, MSG_CMSG_CLOEXEC) != sizeof result || result)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (!header || header->cmsg_type != SCM_RIGHTS)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(fd, CMSG_DATA(header), sizeof *fd);
    return CUDA_SUCCESS;
}

static CUresult hand_out(int connection, CUhandle name)
{
    uint32_t before;
    int fd = -1;
    struct block *block = take_block_named(name, &before);
    if (!block)
        return CUDA_ERROR_INVALID_VALUE;
    bool begun = begin_exports();
    CUresult result = driver()->share(&fd, block->handle, AS_DESCRIPTOR, 0);
    give_block(block, before);
    if (result == CUDA_SUCCESS) {
        send_descriptor(connection, result, fd);
        close(fd);
    }
    end_exports(begun);
    return result;
}

static void serve(int connection)
{
    struct ucred peer;
    struct name wanted;
    socklen_t size = sizeof peer;
    bound(connection);
    if (getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &size) || (peer.uid && peer.uid != geteuid()))
        return;
    if (recv(connection, &wanted, sizeof wanted, MSG_WAITALL) != sizeof wanted)
        return;
    CUresult result = memcmp(wanted.token, token, TOKEN) ? CUDA_ERROR_INVALID_VALUE
                                                         : hand_out(connection, wanted.block);
    if (result)
        send_descriptor(connection, result, -1);
}

static void *listen_for_others(void *argument)
{
    int listener = (int)(intptr_t)argument;
    prctl(PR_SET_NAME, "kybernate-ipc");
    for (;;) {
        int connection = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (connection < 0) {
            usleep(1000);
            continue;
        }
        serve(connection);
        close(connection);
    }
    return NULL;
}

static bool make_token(void)
{
    unsigned char random[TOKEN / 2];
    if (syscall(SYS_getrandom, random, sizeof random, 0) != sizeof random)
        return false;
    for (unsigned i = 0; i < TOKEN; i++)
        token[i] = "0123456789abcdef"[random[i / 2] >> (i % 2 ? 0 : 4) & 15];
    return true;
}

static bool begin_serving(void)
{
    struct sockaddr_un place;
    sigset_t all, before;
    pthread_t thread;
    if (serving == getpid())
        return true;
    if (!make_token())
        return false;
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener < 0)
        return false;
    socklen_t size = place_of(token, &place);
    if (bind(listener, (struct sockaddr *)&place, size) || listen(listener, WAITING)) {
        close(listener);
        return false;
    }
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &before); /* of one thread on Linux, as in answer.c */
    int failed = pthread_create(&thread, NULL, listen_for_others, (void *)(intptr_t)listener);
    sigprocmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        close(listener);
        return false;
    }
    pthread_detach(thread);
    serving = getpid();
    return true;
}

EXPORT CUresult cuIpcGetMemHandle(void *handle, CUdeviceptr address)
{
    uint32_t before;
    struct block *block = handle ? take_block_at(address, &before) : NULL;
    bool ours = block && !(block->flags & BY_PROGRAM);
    struct name name = {.block = 0};
    if (ours) {
        block->flags |= PRIVATE;
        name.block = handle_of(block);
        name.size = block->size;
    }
    if (block)
        give_block(block, before);
    if (!ours)
        return driver()->ipc_handle ? driver()->ipc_handle(handle, address) : CUDA_ERROR_NOT_FOUND;
    pthread_mutex_lock(&beginning);
    bool served = begin_serving();
    pthread_mutex_unlock(&beginning);
    if (!served) {
        fputs("kybernate: CUDA IPC of memory that can be suspended at link speed needs a UNIX socket, which cannot be "
              "made: set kybernate.io/arena to \"false\"\n", stderr);
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    memcpy(name.magic, MAGIC, sizeof MAGIC);
    memcpy(name.token, token, TOKEN);
    memset(handle, 0, sizeof(CUipcMemHandle));
    memcpy(handle, &name, sizeof name);
    return CUDA_SUCCESS;
}

static CUresult fetch(const struct name *name, int *fd)
{
    struct sockaddr_un place;
    socklen_t size = place_of(name->token, &place);
    int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connection < 0)
        return CUDA_ERROR_NOT_SUPPORTED;
    bound(connection);
    CUresult result = CUDA_ERROR_INVALID_VALUE; /* as the driver answers where the other process has ended */
    if (connect(connection, (struct sockaddr *)&place, size) == 0 &&
        send(connection, name, sizeof *name, MSG_NOSIGNAL) == sizeof *name)
        result = receive_descriptor(connection, fd);
    close(connection);
    return result;
}

static CUresult map_at(CUdeviceptr address, size_t size, CUhandle handle)
{
    CUmemAccessDesc access = {{ON_DEVICE, 0}, READ_WRITE};
    CUresult result = driver()->device(&access.location.id);
    if (result == CUDA_SUCCESS)
        result = cuMemMap(address, size, 0, handle, 0);
    if (result)
        return result;
    result = driver()->set_access(address, size, &access, 1);
    if (result)
        cuMemUnmap(address, size);
    return result;
}

static bool note_opened(CUdeviceptr address, size_t size)
{
    bool noted = false;
    lock_blocks();
    for (int i = 0; i < MOST_OPENED && !noted; i++)
        if (!opened[i].size) {
            opened[i] = (struct opened){address, size};
            noted = true;
        }
    unlock_blocks();
    return noted;
}

static size_t forget_opened(CUdeviceptr address)
{
    size_t size = 0;
    lock_blocks();
    for (int i = 0; i < MOST_OPENED && !size; i++)
        if (opened[i].size && opened[i].address == address) {
            size = opened[i].size;
            opened[i].size = 0;
        }
    unlock_blocks();
    return size;
}

static CUresult open_ours(CUdeviceptr *address, const struct name *name)
{
    CUhandle handle;
    int fd = -1;
    CUresult result = fetch(name, &fd);
    if (result)
        return result;
    result = cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd, AS_DESCRIPTOR);
    close(fd);
    if (result)
        return result;
    result = driver()->reserve(address, name->size, 0, 0, 0);
    if (result == CUDA_SUCCESS) {
        result = note_opened(*address, name->size) ? map_at(*address, name->size, handle) : CUDA_ERROR_OUT_OF_MEMORY;
        if (result) {
            forget_opened(*address);
            driver()->unreserve(*address, name->size);
        }
    }
    cuMemRelease(handle); /* as long as it is mapped, it is there */
    return result;
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags)
{
    struct name name;
    memcpy(&name, &handle, sizeof name);
    if (driver()->complete && address && memcmp(name.magic, MAGIC, sizeof MAGIC) == 0)
        return open_ours(address, &name);
    CUresult (*theirs)(CUdeviceptr *, CUipcMemHandle, unsigned int);
    *(void **)&theirs = *(void *const *)&driver()->ipc_open;
    return theirs ? theirs(address, handle, flags) : CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags)
{
    return cuIpcOpenMemHandle_v2(address, handle, flags);
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr address)
{
    size_t size = forget_opened(address);
    if (!size)
        return driver()->ipc_close ? driver()->ipc_close(address) : CUDA_ERROR_NOT_FOUND;
    CUresult result = driver()->synchronize(); /* as the driver's own does */
    if (result == CUDA_SUCCESS)
        result = cuMemUnmap(address, size);
    if (result)
        note_opened(address, size);
    else
        driver()->unreserve(address, size);
    return result;
}
