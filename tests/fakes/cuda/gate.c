/* The gate that every call of the driver passes: a locked process is one whose restore thread has shut it.
 * A test double: see abi.h.
 *
 * As in the real driver, it is the C library's lock of many readers and one writer, with its habits: a reader that
 * waits when the gate opens has passed it, even where its thread is stopped and never learns of it, and the gate cannot
 * be shut again before that thread has gone on and left.
 */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "process.h"
#include "switches.h"

enum { LARGE = 16 << 10 }; /* what no thread's own cache has */

static pthread_rwlock_t gate = PTHREAD_RWLOCK_INITIALIZER;
static bool nvml_is_shut;

/* A function of nvml.c, where the program has loaded it. */
static void *of_nvml(const char *name)
{
    void *library = dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_NOLOAD);
    void *found = library ? dlsym(library, name) : NULL;
    if (library)
        dlclose(library);
    return found;
}

void use_heap(void)
{
    char *volatile memory = malloc(LARGE);
    free(memory);
}

CUresult enter_function(const char *name)
{
    if (!process.started)
        return CUDA_ERROR_NOT_INITIALIZED;
    pthread_rwlock_rdlock(&gate);
    use_heap();
    struct switched what = switched_function(name);
    act_before(what);
    if (what.action == ERROR)
        leave();
    return what.action == ERROR ? what.error : CUDA_SUCCESS;
}

void leave(void)
{
    pthread_rwlock_unlock(&gate);
}

static bool shut(const struct timespec *until)
{
    bool (*shut_nvml)(const struct timespec *);
    if (until ? pthread_rwlock_timedwrlock(&gate, until) : pthread_rwlock_wrlock(&gate))
        return false;
    *(void **)&shut_nvml = of_nvml("fake_nvml_shut");
    nvml_is_shut = shut_nvml && shut_nvml(until);
    if (nvml_is_shut || !shut_nvml)
        return true;
    pthread_rwlock_unlock(&gate);
    return false;
}

bool shut_gate(uint32_t timeout_ms)
{
    struct timespec until;
    if (!timeout_ms)
        return shut(NULL);
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += timeout_ms / 1000;
    until.tv_nsec += timeout_ms % 1000 * 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    return shut(&until);
}

void open_gate(void)
{
    void (*open_nvml)(void);
    *(void **)&open_nvml = nvml_is_shut ? of_nvml("fake_nvml_open") : NULL;
    if (open_nvml)
        open_nvml();
    nvml_is_shut = false;
    pthread_rwlock_unlock(&gate);
}
