/* The driver's part of a checkpoint and a restore: all device memory moves to the host, and back.
 * A test double: see abi.h.
 */
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "memory.h"
#include "physical.h"
#include "switches.h"
#include "virtual.h"

enum { HUGE_PAGE = 2 << 20 };

static struct {
    char *data;
    uint64_t size;
} host_copy;

static void take_time(uint64_t bytes)
{
    double seconds = seconds_per_gib() * (double)bytes / (1 << 30);
    struct timespec left = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    while (nanosleep(&left, &left) < 0 && errno == EINTR)
        ;
}

/* Return memory between two pages that no process may touch. It begins with a huge page: there the kernel places what is
 * large, since Linux 6.7. */
static char *find_gap(uint64_t size)
{
    uint64_t whole = size + HUGE_PAGE + 2 * PAGE;
    char *area = mmap(NULL, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (area == MAP_FAILED)
        return NULL;
    char *gap = (char *)(((uintptr_t)area + PAGE + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE) - PAGE;
    if (gap > area)
        munmap(area, (size_t)(gap - area));
    char *end = gap + size + 2 * PAGE;
    if (area + whole > end)
        munmap(end, (size_t)(area + whole - end));
    return gap;
}

/* Map memory for the host's copy by the call that the real driver makes. Pages around it that no process may touch keep the
 * kernel from merging it with a neighbour; it takes the gap between them as the address that is wished for. */
static char *map_apart(uint64_t size)
{
    char *gap = find_gap(size);
    if (!gap)
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

/* Once, or so many times as HEAP_USES in the program's environment says: between them, other threads get at it. */
static void use_heap_often(void)
{
    const struct timespec pause = {0, 500000};
    const char *uses = getenv("HEAP_USES");
    use_heap();
    for (int i = uses ? atoi(uses) : 1; i > 1; i--) {
        nanosleep(&pause, NULL);
        use_heap();
    }
}

CUresult move_to_host(void)
{
    static const int STAY[MAX_GPUS];
    uint64_t bytes[MAX_GPUS] = {0}, total = allocated_bytes(bytes, STAY) + physical_bytes(bytes, STAY);
    char *data = total ? map_apart(total) : NULL;
    if (total && !data)
        return CUDA_ERROR_OUT_OF_MEMORY;
    take_time(total);
    use_heap_often();
    host_copy.data = data;
    host_copy.size = total;
    virtual_to_host(allocated_to_host(data));
    release_gpus();
    return CUDA_SUCCESS;
}

CUresult move_to_gpus(const struct machine *machine, const int moves[MAX_GPUS])
{
    uint64_t bytes[MAX_GPUS] = {0};
    CUresult result = hold_gpus();
    if (result)
        return result;
    allocated_bytes(bytes, moves);
    physical_bytes(bytes, moves);
    result = charge_all(machine, bytes);
    if (result) {
        release_gpus();
        return result;
    }
    take_time(host_copy.size);
    bool done = true;
    if (host_copy.data) {
        char *rest = allocated_to_gpus(host_copy.data);
        done = rest && virtual_to_gpus(rest);
    }
    if (done && host_copy.data)
        munmap(host_copy.data - PAGE, host_copy.size + 2 * PAGE);
    host_copy.data = NULL;
    return done ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}
