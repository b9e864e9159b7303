/* Device files as the real driver holds them: descriptors, and shared mappings of host memory and of the GPU's own.
 *
 * FAKE_CUDA_DEVICES names them, "CONTROL:GPU", where a machine pretends to have such devices. Unlike the rest of the
 * pretended driver's memory, a forked child inherits them, and CRIU refuses to dump either. A test double: see abi.h.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "process.h"

enum { FILES = 2, SIZE = 64 << 10 };

static struct {
    int fd;
    void *data;
} held[FILES] = {{-1, NULL}, {-1, NULL}};

static bool hold(int index, const char *path)
{
    int flags = MAP_SHARED | (held[index].data ? MAP_FIXED : 0); /* where it was before a checkpoint */
    int protection = index ? PROT_WRITE : PROT_READ | PROT_WRITE;
    held[index].fd = open(path, O_RDWR | O_CLOEXEC);
    if (held[index].fd < 0)
        return false;
    void *data = mmap(held[index].data, SIZE, protection, flags, held[index].fd, 0);
    if (data == MAP_FAILED)
        return false;
    held[index].data = data;
    return true;
}

bool hold_devices(void)
{
    char text[256], *rest = text, *one;
    const char *devices = getenv("FAKE_CUDA_DEVICES");
    if (!devices)
        return true;
    strncpy(text, devices, sizeof text - 1);
    text[sizeof text - 1] = 0;
    for (int i = 0; i < FILES && (one = strsep(&rest, ":")); i++)
        if (!hold(i, one))
            return false;
    return true;
}

void release_devices(void)
{
    for (int i = 0; i < FILES; i++)
        if (held[i].fd >= 0) {
            munmap(held[i].data, SIZE);
            close(held[i].fd);
            held[i].fd = -1;
        }
}

EXPORT void *fakeHostMemory(void)
{
    return held[0].data;
}
