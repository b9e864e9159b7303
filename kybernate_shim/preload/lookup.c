/* How programs find the driver, and how they find us instead.
 *
 * A program calls the driver's functions by their symbols, which the dynamic linker resolves to ours; or it asks
 * dlsym(3) for them, as ctypes does; or it asks the driver's own cuGetProcAddress, as libcudart does, whether it is
 * a shared library or part of the program. All three lead here.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "driver.h"
#include "rwlocks.h"
#include "uses.h"
#include "versions.h"

#define EXPORT __attribute__((visibility("default")))

/* The calls that we answer: as they are exported, as cuGetProcAddress names them, and the first API version of this
 * signature. */
#define ANSWERED(A)                                                                                                    \
    A(cuInit, "cuInit", 2000)                                                                                          \
    A(cuMemAlloc_v2, "cuMemAlloc", 3020)                                                                               \
    A(cuMemFree_v2, "cuMemFree", 3020)                                                                                 \
    A(cuMemCreate, "cuMemCreate", 10020)                                                                               \
    A(cuMemRelease, "cuMemRelease", 10020)                                                                             \
    A(cuMemMap, "cuMemMap", 10020)                                                                                     \
    A(cuMemUnmap, "cuMemUnmap", 10020)                                                                                 \
    A(cuMemSetAccess, "cuMemSetAccess", 10020)                                                                         \
    A(cuMemExportToShareableHandle, "cuMemExportToShareableHandle", 10020)                                             \
    A(cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle", 10020)                                         \
    A(cuMemRetainAllocationHandle, "cuMemRetainAllocationHandle", 11000)                                               \
    A(cuMemGetAllocationPropertiesFromHandle, "cuMemGetAllocationPropertiesFromHandle", 10020)                         \
    A(cuMulticastBindMem, "cuMulticastBindMem", 12010)                                                                 \
    A(cuIpcGetMemHandle, "cuIpcGetMemHandle", 4010)                                                                    \
    A(cuIpcOpenMemHandle_v2, "cuIpcOpenMemHandle", 11000)                                                              \
    A(cuIpcOpenMemHandle, "cuIpcOpenMemHandle", 4010)                                                                  \
    A(cuIpcCloseMemHandle, "cuIpcCloseMemHandle", 4010)                                                                \
    A(cuCtxDestroy_v2, "cuCtxDestroy", 4000)                                                                           \
    A(cuCtxEnablePeerAccess, "cuCtxEnablePeerAccess", 4000)                                                            \
    A(cuDevicePrimaryCtxRelease_v2, "cuDevicePrimaryCtxRelease", 11000)                                                \
    A(cuDevicePrimaryCtxReset_v2, "cuDevicePrimaryCtxReset", 11000)                                                    \
    A(cuMemAllocPitch_v2, "cuMemAllocPitch", 3020)                                                                     \
    A(cuMemAllocManaged, "cuMemAllocManaged", 6000)                                                                    \
    A(cuMemAllocAsync, "cuMemAllocAsync", 11020)                                                                       \
    A(cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync", 11020)                                                       \
    A(cuMemFreeAsync, "cuMemFreeAsync", 11020)                                                                         \
    A(cuArrayCreate_v2, "cuArrayCreate", 3020)                                                                         \
    A(cuArray3DCreate_v2, "cuArray3DCreate", 3020)                                                                     \
    A(cuArrayDestroy, "cuArrayDestroy", 2000)                                                                          \
    A(cuMipmappedArrayCreate, "cuMipmappedArrayCreate", 5000)                                                          \
    A(cuMipmappedArrayDestroy, "cuMipmappedArrayDestroy", 5000)                                                        \
    A(cuMemGetInfo_v2, "cuMemGetInfo", 3020)                                                                           \
    A(cuDeviceTotalMem_v2, "cuDeviceTotalMem", 3020)

/* Those that have a second form, whose default stream is the thread's own. */
#define ANSWERED_BY_THREAD(A)                                                                                          \
    A(cuMemAllocAsync_ptsz, "cuMemAllocAsync", 11020)                                                                  \
    A(cuMemAllocFromPoolAsync_ptsz, "cuMemAllocFromPoolAsync", 11020)                                                  \
    A(cuMemFreeAsync_ptsz, "cuMemFreeAsync", 11020)

enum { OF_THREAD = 2 }; /* of cuGetProcAddress's flags: that form is asked for */

#define DECLARE(symbol, name, version) extern function symbol;
ANSWERED(DECLARE)
ANSWERED_BY_THREAD(DECLARE)
#undef DECLARE

EXPORT CUresult cuGetProcAddress(const char *name, void **found, int version, uint64_t flags);
EXPORT CUresult cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status);
EXPORT void *dlsym(void *restrict handle, const char *restrict name);

static struct driver behind;
static pthread_once_t opened = PTHREAD_ONCE_INIT;

static function *real_dlsym(void)
{
    static _Atomic(function *) known;
    function *found = atomic_load_explicit(&known, memory_order_relaxed);
    if (!found) {
        *(void **)&found = dlvsym(RTLD_NEXT, "dlsym", OLDEST_GLIBC);
        atomic_store_explicit(&known, found, memory_order_relaxed);
    }
    return found;
}

#define REAL_DLSYM(handle, name) (((void *(*)(void *, const char *))real_dlsym())(handle, name))

static function *real_symbol(void *library, const char *symbol)
{
    function *found;
    *(void **)&found = REAL_DLSYM(library, symbol);
    return found;
}

/* By its handle, which sees the driver and what the driver needs, but not us. */
static void open_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (!library)
        library = dlopen("libcuda.so.1", RTLD_LAZY);
    find_used(real_symbol, library);
    if (!library)
        return;
#define FIND(symbol, name, types) *(void **)&behind.name = REAL_DLSYM(library, #symbol);
    CALLS(FIND)
#undef FIND
    behind.complete = behind.alloc && behind.free && behind.create && behind.release && behind.map && behind.unmap &&
                      behind.set_access && behind.reserve && behind.unreserve && behind.share && behind.granularity &&
                      behind.attribute && behind.context && behind.device && behind.push && behind.pop &&
                      behind.synchronize && behind.primary_retain && behind.primary_release;
    if (behind.complete)
        watch_rwlocks_of(*(void **)&behind.alloc);
}

const struct driver *driver(void)
{
    pthread_once(&opened, open_driver);
    return &behind;
}

static function *by_symbol(const char *symbol)
{
#define MATCH(mine, name, version)                                                                                     \
    if (strcmp(symbol, #mine) == 0)                                                                                    \
        return mine;
    ANSWERED(MATCH)
    ANSWERED_BY_THREAD(MATCH)
#undef MATCH
    if (strcmp(symbol, "cuGetProcAddress") == 0)
        return (function *)cuGetProcAddress;
    if (strcmp(symbol, "cuGetProcAddress_v2") == 0)
        return (function *)cuGetProcAddress_v2;
    return counted_symbol(symbol);
}

static function *by_name(const char *asked, int wanted, uint64_t flags)
{
#define MATCH(mine, name, version)                                                                                     \
    if (wanted >= version && strcmp(asked, name) == 0)                                                                 \
        return mine;
    if (flags & OF_THREAD) {
        ANSWERED_BY_THREAD(MATCH)
    }
    ANSWERED(MATCH)
#undef MATCH
    if (strcmp(asked, "cuGetProcAddress") == 0)
        return wanted >= 12000 ? (function *)cuGetProcAddress_v2 : (function *)cuGetProcAddress;
    return NULL;
}

/* dlsym resolves RTLD_NEXT and RTLD_DEFAULT by the address of its caller, so the last line must remain a jump: the
 * compiler makes it one at -O2, and a test checks that. */
EXPORT void *dlsym(void *restrict handle, const char *restrict name)
{
    if (name[0] == 'c' && name[1] == 'u' && handle != RTLD_NEXT) {
        function *mine = by_symbol(name);
        if (mine && REAL_DLSYM(handle, name))
            return *(void **)&mine;
    }
    return REAL_DLSYM(handle, name);
}

static void put_ours(const char *name, void **found, int version, uint64_t flags)
{
    function *mine = found && *found ? by_name(name, version, flags) : NULL;
    if (found && *found && !mine)
        mine = counted_function(*found);
    if (mine)
        *found = *(void **)&mine;
}

EXPORT CUresult cuGetProcAddress(const char *name, void **found, int version, uint64_t flags)
{
    if (!driver()->proc)
        return CUDA_ERROR_NOT_FOUND;
    CUresult result = driver()->proc(name, found, version, flags);
    if (result == CUDA_SUCCESS)
        put_ours(name, found, version, flags);
    return result;
}

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status)
{
    if (!driver()->proc_status)
        return CUDA_ERROR_NOT_FOUND;
    CUresult result = driver()->proc_status(name, found, version, flags, status);
    if (result == CUDA_SUCCESS)
        put_ours(name, found, version, flags);
    return result;
}
