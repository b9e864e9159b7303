/* Initialisation, devices and contexts, as programs call them. A test double: see abi.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "memory.h"
#include "switches.h"

struct context {
    int device;
    int references; /* of a primary context; 0: not there */
};

enum { STACK = 16 };

struct process process;
static struct context primary[MAX_GPUS];
static pthread_mutex_t init_lock = PTHREAD_MUTEX_INITIALIZER;
static __thread struct context *stack[STACK];
static __thread int depth;

int current_device(void)
{
    return depth > 0 && stack[depth - 1] ? stack[depth - 1]->device : -1;
}

/* A forked child has neither the restore thread nor the mailbox; the real driver is not to be used there either. */
static void after_fork(void)
{
    process.started = 0;
}

bool can_open(int gpu)
{
    char node[32];
    bool any = false;
    for (int i = 0; i < MAX_GPUS; i++) {
        snprintf(node, sizeof node, "/dev/nvidia%d", i);
        if (access(node, F_OK) == 0) {
            if (i == gpu)
                return true;
            any = true;
        }
    }
    return !any;
}

/* Show the GPUs that CUDA_VISIBLE_DEVICES lists by index, in its order; all that can be opened when it is not set. */
static void list_devices(const struct machine *machine)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    char text[256], *rest = text, *one;
    process.count = process.known_count = 0;
    for (int i = 0; i < machine->count; i++)
        if (can_open(i))
            process.known[process.known_count++] = (struct device){i, machine->gpus[i].uuid};
    for (int i = 0; !visible && i < process.known_count; i++)
        process.devices[process.count++] = process.known[i];
    if (visible) {
        snprintf(text, sizeof text, "%s", visible);
        while ((one = strsep(&rest, ",")) && *one && process.count < MAX_GPUS) {
            int index = atoi(one);
            if (index < 0 || index >= process.known_count)
                break;
            process.devices[process.count++] = process.known[index];
        }
    }
}

static CUresult start(void)
{
    static unsigned calls;
    struct machine machine;
    const char *switches = getenv("FAKE_CUDA_FAIL");
    struct switched what = switched(switches ? switches : "", "init", ++calls, 0);
    act_before(what);
    if (what.action == ERROR)
        return what.error;
    if (!read_machine(&machine))
        return CUDA_ERROR_NO_DEVICE;
    list_devices(&machine);
    if (process.count == 0)
        return CUDA_ERROR_NO_DEVICE;
    CUresult result = hold_gpus();
    if (result == CUDA_SUCCESS)
        result = start_restorer();
    if (result == CUDA_SUCCESS) {
        pthread_atfork(NULL, NULL, after_fork);
        process.started = 1;
    }
    return result;
}

EXPORT CUresult cuInit(unsigned int flags)
{
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&init_lock);
    CUresult result = process.started ? CUDA_SUCCESS : start();
    pthread_mutex_unlock(&init_lock);
    return result;
}

EXPORT CUresult cuDriverGetVersion(int *version)
{
    char release[32];
    read_driver(version, release, sizeof release);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *count)
{
    CUresult result = enter();
    if (result)
        return result;
    *count = process.count;
    leave();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    CUresult result = enter();
    if (result)
        return result;
    if (ordinal < 0 || ordinal >= process.count)
        result = CUDA_ERROR_INVALID_DEVICE;
    else
        *device = ordinal;
    leave();
    return result;
}

/* Read the GPU under a device; the gate must have been passed. */
static CUresult gpu_of(CUdevice device, struct gpu *gpu)
{
    struct machine machine;
    if (device < 0 || device >= process.count || !read_machine(&machine))
        return CUDA_ERROR_INVALID_DEVICE;
    if (process.devices[device].place >= machine.count)
        return CUDA_ERROR_INVALID_DEVICE;
    *gpu = machine.gpus[process.devices[device].place];
    return CUDA_SUCCESS;
}

/* What a call that only asks for a GPU's properties needs of it. */
static CUresult enter_and_read(const char *name, CUdevice device, struct gpu *gpu)
{
    CUresult result = enter_function(name);
    if (result)
        return result;
    result = gpu_of(device, gpu);
    leave();
    return result;
}

EXPORT CUresult cuDeviceGetName(char *name, int size, CUdevice device)
{
    struct gpu gpu;
    CUresult result = enter_and_read(__func__, device, &gpu);
    if (result == CUDA_SUCCESS)
        snprintf(name, (size_t)size, "%s", gpu.model);
    return result;
}

/* The GPU's place on the bus is its place among the GPUs, from 1 on. */
EXPORT CUresult cuDeviceGetPCIBusId(char *id, int size, CUdevice device)
{
    struct gpu gpu;
    CUresult result = enter_and_read(__func__, device, &gpu);
    if (result == CUDA_SUCCESS)
        snprintf(id, (size_t)size, "00FA:%02X:00.0", process.devices[device].place + 1);
    return result;
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    struct gpu gpu;
    CUresult result = enter_and_read(__func__, device, &gpu);
    if (result == CUDA_SUCCESS)
        *bytes = gpu.bytes;
    return result;
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    CUresult result = enter();
    if (result)
        return result;
    if (device < 0 || device >= process.count)
        result = CUDA_ERROR_INVALID_DEVICE;
    else
        *uuid = process.devices[device].uuid;
    leave();
    return result;
}

EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    return cuDeviceGetUuid_v2(uuid, device);
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    struct gpu gpu;
    uint64_t used[MAX_GPUS];
    CUresult result = enter();
    if (result)
        return result;
    result = current_device() < 0 ? CUDA_ERROR_INVALID_CONTEXT : gpu_of(current_device(), &gpu);
    if (result == CUDA_SUCCESS) {
        used_bytes(used);
        *total_bytes = gpu.bytes;
        *free_bytes = gpu.bytes - used[process.devices[current_device()].place];
    }
    leave();
    return result;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    CUresult result = enter();
    if (result)
        return result;
    pthread_mutex_lock(&init_lock);
    if (device < 0 || device >= process.count)
        result = CUDA_ERROR_INVALID_DEVICE;
    else if (primary[device].references == 0)
        result = charge_context(device);
    if (result == CUDA_SUCCESS) {
        primary[device].device = device;
        primary[device].references++;
        *context = &primary[device];
    }
    pthread_mutex_unlock(&init_lock);
    leave();
    return result;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    CUresult result = enter();
    if (result)
        return result;
    pthread_mutex_lock(&init_lock);
    if (device < 0 || device >= process.count || primary[device].references == 0)
        result = CUDA_ERROR_INVALID_CONTEXT;
    else if (--primary[device].references == 0)
        discharge_context(device);
    pthread_mutex_unlock(&init_lock);
    leave();
    return result;
}

static CUresult push(CUcontext context)
{
    if (depth == STACK)
        return CUDA_ERROR_OUT_OF_MEMORY;
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device)
{
    (void)flags;
    CUresult result = enter();
    if (result)
        return result;
    struct context *made = calloc(1, sizeof *made);
    result = device < 0 || device >= process.count ? CUDA_ERROR_INVALID_DEVICE : charge_context(device);
    if (result == CUDA_SUCCESS && made) {
        made->device = device;
        *context = made;
        result = push(made);
    } else {
        free(made);
    }
    leave();
    return result;
}

EXPORT CUresult cuCtxCreate_v4(CUcontext *context, const void *parameters, unsigned int flags, CUdevice device)
{
    (void)parameters;
    return cuCtxCreate_v2(context, flags, device);
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext context)
{
    CUresult result = enter();
    if (result)
        return result;
    if (depth > 0 && stack[depth - 1] == context)
        depth--;
    discharge_context(context->device);
    free(context);
    leave();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    CUresult result = enter();
    if (result)
        return result;
    result = push(context);
    leave();
    return result;
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    CUresult result = enter();
    if (result)
        return result;
    if (depth == 0)
        result = CUDA_ERROR_INVALID_CONTEXT;
    else if (depth-- && context)
        *context = stack[depth];
    leave();
    return result;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context)
{
    CUresult result = enter();
    if (result)
        return result;
    if (depth > 0)
        stack[depth - 1] = context;
    else
        result = push(context);
    leave();
    return result;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context)
{
    CUresult result = enter();
    if (result)
        return result;
    *context = depth > 0 ? stack[depth - 1] : NULL;
    leave();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device)
{
    CUresult result = enter();
    if (result)
        return result;
    *device = current_device();
    leave();
    return *device < 0 ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

enum { CAPABILITY_MAJOR = 75 };

EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    (void)device;
    *value = attribute == CAPABILITY_MAJOR ? 9 : 0; /* the minor one is 0, too */
    return process.started ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active)
{
    CUresult result = enter();
    if (result)
        return result;
    result = device < 0 || device >= process.count ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS) {
        *flags = 0;
        *active = primary[device].references > 0;
    }
    leave();
    return result;
}

EXPORT CUresult cuCtxSynchronize(void)
{
    CUresult result = enter();
    if (result)
        return result;
    result = current_device() < 0 ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
    leave();
    return result;
}
