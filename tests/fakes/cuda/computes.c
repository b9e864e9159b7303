/* A program that computes on a GPU and checks every word of it: computes [MIB] [STEP_MS] [DEVICE] [BUSY_MS]
 *
 * Prints "step N checksum X" per step, forever; each word of device memory advances by one step of a generator whose
 * value after N steps the host knows, so that a single lost or stale word ends the program with status 3.
 * With BUSY_MS the GPU works that long in each step, which a lock has to wait for. With COMPUTES_MANAGED in the
 * environment, its memory is managed memory. With COMPUTES_POLLS, a thread asks whether work is done, so many
 * microseconds apart, or for "usr1" at each SIGUSR1. With COMPUTES_NVML, a thread asks NVML for the GPU's memory, so
 * many microseconds apart or at each SIGUSR1 ("usr1"). With COMPUTES_FORKS, a thread forks so many microseconds apart; a
 * child that has a descriptor of exported memory ends the program with status 4.
 * It loads libcuda.so.1 at run time. A test workload.
 */
#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "abi.h"

static void *library;

static void check(CUresult result, const char *call)
{
    if (result != CUDA_SUCCESS) {
        printf("%s failed: %d\n", call, result);
        exit(2);
    }
}

/* Call a function of the driver by name; the signature follows from the arguments' types. */
#define CALL(name, types, ...) check(((CUresult(*) types)dlsym(library, name))(__VA_ARGS__), name)

static uint32_t seed(uint64_t index)
{
    return (uint32_t)(index * 2654435761u + 1);
}

static void wait_ms(long milliseconds)
{
    struct timespec left = {milliseconds / 1000, milliseconds % 1000 * 1000000};
    while (nanosleep(&left, &left) < 0 && errno == EINTR) /* a dump interrupts it */
        ;
}

static void launch(CUfunction kernel, void **parameters)
{
    CALL("cuLaunchKernel",
         (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **),
         kernel, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL);
}

static CUmodule set_up(int device, uint64_t count, uint32_t *words, CUdeviceptr *memory)
{
    CUcontext context;
    CUmodule module;
    CALL("cuInit", (unsigned int), 0);
    CALL("cuDevicePrimaryCtxRetain", (CUcontext *, CUdevice), &context, device);
    CALL("cuCtxSetCurrent", (CUcontext), context);
    CALL("cuModuleLoadData", (CUmodule *, const void *), &module, "");
    for (uint64_t i = 0; i < count; i++)
        words[i] = seed(i);
    if (getenv("COMPUTES_MANAGED"))
        CALL("cuMemAllocManaged", (CUdeviceptr *, size_t, unsigned int), memory, count * sizeof *words, 1);
    else
        CALL("cuMemAlloc_v2", (CUdeviceptr *, size_t), memory, count * sizeof *words);
    CALL("cuMemcpyHtoD_v2", (CUdeviceptr, const void *, size_t), *memory, words, count * sizeof *words);
    return module;
}

static CUfunction find(CUmodule module, const char *name)
{
    CUfunction kernel;
    CALL("cuModuleGetFunction", (CUfunction *, CUmodule, const char *), &kernel, module, name);
    return kernel;
}

/* Return whether a word is not seed * factor + offset, and the sum of all. Without branches and products: a test that
 * waits pays for each step of its programs.
 */
static int differ(const uint32_t *words, uint64_t count, uint32_t factor, uint32_t offset, uint32_t *sum)
{
    uint32_t wrong = 0, total = 0, first = seed(0) * factor + offset, apart = (seed(1) - seed(0)) * factor;
    for (uint64_t i = 0; i < count; i++) {
        wrong |= words[i] ^ (first + (uint32_t)i * apart);
        total += words[i];
    }
    *sum = total;
    return wrong != 0;
}

static void name_wrong(const uint32_t *words, uint32_t factor, uint32_t offset, uint64_t step)
{
    uint64_t i = 0;
    while (words[i] == seed(i) * factor + offset)
        i++;
    printf("wrong: word %" PRIu64 " at step %" PRIu64 "\n", i, step);
}

typedef CUresult (*of_object)(void *);

static bool polls_by_signal(const char *variable, sigset_t *wanted)
{
    const char *how = getenv(variable);
    sigemptyset(wanted);
    sigaddset(wanted, SIGUSR1);
    return how && !strcmp(how, "usr1");
}

static void wait_to_poll(const char *variable)
{
    sigset_t wanted;
    int number;
    if (polls_by_signal(variable, &wanted))
        sigwait(&wanted, &number);
    else
        usleep((useconds_t)atoi(getenv(variable)));
}

static void *poll_gpu(void *context)
{
    static const char *const CALLS[] = {"cuEventQuery", "cuEventSynchronize", "cuStreamQuery", "cuStreamSynchronize"};
    enum { COUNT = sizeof CALLS / sizeof *CALLS };
    of_object calls[COUNT];
    CUresult (*elapsed)(float *, void *, void *);
    void *event;
    float milliseconds;
    CALL("cuCtxSetCurrent", (CUcontext), context);
    CALL("cuEventCreate", (void **, unsigned int), &event, 0);
    CALL("cuEventRecord", (void *, CUstream), event, NULL);
    elapsed = (CUresult(*)(float *, void *, void *))dlsym(library, "cuEventElapsedTime");
    for (int i = 0; i < COUNT; i++) /* before it begins, for dlsym has a lock */
        calls[i] = (of_object)dlsym(library, CALLS[i]);
    for (;; wait_to_poll("COMPUTES_POLLS")) {
        for (int i = 0; i < COUNT; i++)
            check(calls[i](event), CALLS[i]);
        check(elapsed(&milliseconds, event, event), "cuEventElapsedTime");
    }
    return NULL;
}

static void *poll_nvml(void *variable)
{
    unsigned long long memory[3];
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW), *device;
    int (*init)(void), (*handle)(unsigned int, void **), (*look)(void *, unsigned long long *);
    check(nvml ? CUDA_SUCCESS : 999, "dlopen of NVML");
    *(void **)&init = dlsym(nvml, "nvmlInit_v2");
    *(void **)&handle = dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2");
    *(void **)&look = dlsym(nvml, "nvmlDeviceGetMemoryInfo");
    check(init(), "nvmlInit_v2");
    check(handle(0, &device), "nvmlDeviceGetHandleByIndex_v2");
    for (;; wait_to_poll(variable))
        check(look(device, memory), "nvmlDeviceGetMemoryInfo");
    return NULL;
}

static void start_thread(void *(*body)(void *), void *argument)
{
    pthread_t thread;
    check(pthread_create(&thread, NULL, body, argument) ? 999 : CUDA_SUCCESS, "pthread_create");
}

static void start_polling(void)
{
    CUcontext context;
    CALL("cuCtxGetCurrent", (CUcontext *), &context);
    start_thread(poll_gpu, context);
}

/* Return whether two of the descriptors are of the same memory: the driver has one for itself. */
static int has_memory_twice(void)
{
    enum { MOST = 256 };
    ino_t seen[MOST];
    int count = 0;
    for (int fd = 0; fd < MOST; fd++) {
        char path[64], name[64] = "";
        struct stat about;
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        if (readlink(path, name, sizeof name - 1) < 0 || !strstr(name, "fake-vram-") || fstat(fd, &about) < 0)
            continue;
        for (int i = 0; i < count; i++)
            if (seen[i] == about.st_ino)
                return 1;
        seen[count++] = about.st_ino;
    }
    return 0;
}

static void *fork_children(void *argument)
{
    for (;; usleep((useconds_t)atoi(argument))) {
        int status = 0;
        pid_t child = fork();
        if (child == 0)
            _exit(has_memory_twice());
        while (waitpid(child, &status, 0) < 0 && errno == EINTR)
            ;
        if (status) {
            printf("wrong: a child ended with %x\n", status);
            exit(4);
        }
    }
    return NULL;
}

int main(int argc, char **argv)
{
    uint64_t count = strtoull(argc > 1 ? argv[1] : "4", NULL, 10) << 18;
    long pause = strtol(argc > 2 ? argv[2] : "20", NULL, 10);
    uint32_t *words = malloc(count * sizeof *words);
    uint32_t factor = 1, offset = 0; /* after N steps a word is seed * factor + offset */
    CUdeviceptr memory;
    uint64_t busy = strtoull(argc > 4 ? argv[4] : "0", NULL, 10) * 1000000;

    library = dlopen("libcuda.so.1", RTLD_NOW);
    sigset_t wanted;
    if (polls_by_signal("COMPUTES_POLLS", &wanted) || polls_by_signal("COMPUTES_NVML", &wanted))
        pthread_sigmask(SIG_BLOCK, &wanted, NULL); /* for the thread that waits for it */
    if (!library || !words) {
        printf("cannot start: %s\n", library ? "no memory" : dlerror());
        return 2;
    }
    CUmodule module = set_up(argc > 3 ? atoi(argv[3]) : 0, count, words, &memory);
    CUfunction advance = find(module, "advance"), spin = find(module, "spin");
    if (getenv("COMPUTES_POLLS"))
        start_polling();
    if (getenv("COMPUTES_NVML"))
        start_thread(poll_nvml, "COMPUTES_NVML");
    if (getenv("COMPUTES_FORKS"))
        start_thread(fork_children, getenv("COMPUTES_FORKS"));
    for (uint64_t step = 1;; step++) {
        uint32_t sum;
        launch(advance, (void *[]){&memory, &count});
        if (busy)
            launch(spin, (void *[]){&busy});
        CALL("cuMemcpyDtoH_v2", (void *, CUdeviceptr, size_t), words, memory, count * sizeof *words);
        factor *= 1664525u;
        offset = offset * 1664525u + 1013904223u;
        if (differ(words, count, factor, offset, &sum)) {
            name_wrong(words, factor, offset, step);
            return 3;
        }
        printf("step %" PRIu64 " checksum %08" PRIx32 "\n", step, sum);
        fflush(stdout);
        wait_ms(pause);
    }
}
