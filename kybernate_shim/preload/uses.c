/* Which of the driver's calls count as use of the GPU: all that wait while the process is suspended, except those with
 * which programs only poll the GPU, such as cuMemGetInfo, cuEventQuery and cuStreamQuery.
 *
 * Each has a stub that jumps to the driver, with registers and stack as they are: no signature is known here. The stub
 * looks at one word, which the node sets while the process is suspended, and which the first call that counts clears.
 */
#include "uses.h"

#include <limits.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "blocks.h"
#include "driver.h"

enum { WAKE = 1 /* FUTEX_WAKE: the node is another process */ };

#define EACH_FORM(F, name) F(name) F(name##_ptsz)
#define EACH_COPY(F, name) F(name) F(name##_ptds)
#define USED(F)                                                                                                        \
    EACH_FORM(F, cuLaunchKernel) EACH_FORM(F, cuLaunchKernelEx) EACH_FORM(F, cuLaunchCooperativeKernel)                \
    EACH_FORM(F, cuLaunchHostFunc) EACH_FORM(F, cuGraphLaunch) EACH_FORM(F, cuGraphUpload)                             \
    EACH_COPY(F, cuMemcpy) EACH_FORM(F, cuMemcpyAsync) EACH_COPY(F, cuMemcpyPeer) EACH_FORM(F, cuMemcpyPeerAsync)      \
    EACH_COPY(F, cuMemcpyHtoD_v2) EACH_COPY(F, cuMemcpyDtoH_v2) EACH_COPY(F, cuMemcpyDtoD_v2)                          \
    EACH_FORM(F, cuMemcpyHtoDAsync_v2) EACH_FORM(F, cuMemcpyDtoHAsync_v2) EACH_FORM(F, cuMemcpyDtoDAsync_v2)           \
    EACH_COPY(F, cuMemcpyHtoA_v2) EACH_COPY(F, cuMemcpyAtoH_v2) EACH_COPY(F, cuMemcpyDtoA_v2)                          \
    EACH_COPY(F, cuMemcpyAtoD_v2) EACH_COPY(F, cuMemcpyAtoA_v2) EACH_FORM(F, cuMemcpyHtoAAsync_v2)                     \
    EACH_FORM(F, cuMemcpyAtoHAsync_v2) EACH_COPY(F, cuMemcpy2D_v2) EACH_COPY(F, cuMemcpy2DUnaligned_v2)                \
    EACH_FORM(F, cuMemcpy2DAsync_v2) EACH_COPY(F, cuMemcpy3D_v2) EACH_FORM(F, cuMemcpy3DAsync_v2)                      \
    EACH_COPY(F, cuMemcpy3DPeer) EACH_FORM(F, cuMemcpy3DPeerAsync) EACH_FORM(F, cuMemcpyBatchAsync)                    \
    EACH_FORM(F, cuMemcpyBatchAsync_v2) EACH_FORM(F, cuMemcpy3DBatchAsync) EACH_FORM(F, cuMemcpy3DBatchAsync_v2)       \
    EACH_COPY(F, cuMemsetD8_v2) EACH_COPY(F, cuMemsetD16_v2) EACH_COPY(F, cuMemsetD32_v2)                              \
    EACH_COPY(F, cuMemsetD2D8_v2) EACH_COPY(F, cuMemsetD2D16_v2) EACH_COPY(F, cuMemsetD2D32_v2)                        \
    EACH_FORM(F, cuMemsetD8Async) EACH_FORM(F, cuMemsetD16Async) EACH_FORM(F, cuMemsetD32Async)                        \
    EACH_FORM(F, cuMemsetD2D8Async) EACH_FORM(F, cuMemsetD2D16Async) EACH_FORM(F, cuMemsetD2D32Async)                  \
    EACH_FORM(F, cuMemPrefetchAsync) EACH_FORM(F, cuMemPrefetchAsync_v2)                                               \
    F(cuCtxSynchronize) EACH_FORM(F, cuStreamSynchronize) F(cuEventSynchronize) EACH_FORM(F, cuEventRecord)            \
    EACH_FORM(F, cuEventRecordWithFlags) EACH_FORM(F, cuStreamWaitEvent) EACH_FORM(F, cuStreamWriteValue32_v2)         \
    EACH_FORM(F, cuStreamWriteValue64_v2) EACH_FORM(F, cuStreamWaitValue32_v2) EACH_FORM(F, cuStreamWaitValue64_v2)    \
    EACH_FORM(F, cuStreamBatchMemOp_v2) EACH_FORM(F, cuStreamBeginCapture_v2) F(cuStreamCreate)                        \
    F(cuStreamCreateWithPriority) F(cuStreamDestroy_v2) F(cuEventCreate) F(cuEventDestroy_v2) F(cuModuleLoad)          \
    F(cuModuleLoadData) F(cuModuleLoadDataEx) F(cuModuleUnload) F(cuModuleGetFunction) F(cuLibraryLoadData)            \
    F(cuLibraryGetKernel) F(cuGraphInstantiateWithFlags) F(cuGraphInstantiateWithParams) F(cuGraphExecDestroy)         \
    F(cuMemHostAlloc) F(cuMemAllocHost_v2) F(cuMemFreeHost) F(cuMemHostRegister_v2) F(cuMemHostUnregister)             \
    F(cuMemAddressReserve) F(cuMemAddressFree) F(cuCtxCreate_v2) F(cuCtxCreate_v3) F(cuCtxCreate_v4)                   \
    F(cuCtxSetCurrent) F(cuCtxPushCurrent_v2) F(cuDevicePrimaryCtxRetain)

#if defined(__x86_64__)

/* Always set, and never: before the first call of all, and where there is no page. */
static _Atomic uint32_t at_first = 1, never;
__attribute__((visibility("hidden"))) _Atomic(_Atomic uint32_t *) kybernate_watched = &at_first;
__attribute__((visibility("hidden"))) void kybernate_note(void);

#define STUB(symbol)                                                                                                   \
    extern function symbol;                                                                                            \
    __attribute__((visibility("hidden"))) void *kybernate_real_##symbol;                                               \
    __asm__(".text\n.p2align 4\n.globl " #symbol "\n.type " #symbol ", @function\n" #symbol ":\n"                      \
            "endbr64\n"                                                                                                \
            "movq kybernate_watched(%rip), %r11\n"                                                                     \
            "cmpl $0, (%r11)\n"                                                                                        \
            "jne 1f\n"                                                                                                 \
            "jmp *kybernate_real_" #symbol "(%rip)\n"                                                                  \
            "1: leaq kybernate_real_" #symbol "(%rip), %r11\n"                                                         \
            "jmp kybernate_note_first\n"                                                                               \
            ".size " #symbol ", . - " #symbol "\n");
USED(STUB)
#undef STUB

/* Note a use with all registers kept that carry arguments, then jump to what %r11 points to. */
__asm__(".text\n.p2align 4\n.type kybernate_note_first, @function\nkybernate_note_first:\n"
        "pushq %r11\n pushq %rdi\n pushq %rsi\n pushq %rdx\n pushq %rcx\n pushq %r8\n pushq %r9\n pushq %rax\n pushq %r10\n"
        "subq $128, %rsp\n"
        "movups %xmm0, (%rsp)\n movups %xmm1, 16(%rsp)\n movups %xmm2, 32(%rsp)\n movups %xmm3, 48(%rsp)\n"
        "movups %xmm4, 64(%rsp)\n movups %xmm5, 80(%rsp)\n movups %xmm6, 96(%rsp)\n movups %xmm7, 112(%rsp)\n"
        "call kybernate_note\n"
        "movups (%rsp), %xmm0\n movups 16(%rsp), %xmm1\n movups 32(%rsp), %xmm2\n movups 48(%rsp), %xmm3\n"
        "movups 64(%rsp), %xmm4\n movups 80(%rsp), %xmm5\n movups 96(%rsp), %xmm6\n movups 112(%rsp), %xmm7\n"
        "addq $128, %rsp\n"
        "popq %r10\n popq %rax\n popq %r9\n popq %r8\n popq %rcx\n popq %rdx\n popq %rsi\n popq %rdi\n popq %r11\n"
        "jmp *(%r11)\n"
        ".size kybernate_note_first, . - kybernate_note_first\n");

static const struct used {
    const char *symbol;
    function *stub;
    void **real;
} ALL[] = {
#define LIST(symbol) {#symbol, symbol, &kybernate_real_##symbol},
    USED(LIST)
#undef LIST
};
enum { COUNT = sizeof ALL / sizeof *ALL };

static CUresult missing(void)
{
    return CUDA_ERROR_NOT_FOUND;
}

void find_used(function *(*lookup)(void *library, const char *symbol), void *library)
{
    for (int i = 0; i < COUNT; i++) {
        function *found = library ? lookup(library, ALL[i].symbol) : NULL;
        if (!found)
            found = (function *)missing;
        *ALL[i].real = *(void **)&found;
    }
}

function *counted_symbol(const char *symbol)
{
    for (int i = 0; i < COUNT; i++)
        if (strcmp(ALL[i].symbol, symbol) == 0)
            return ALL[i].stub;
    return NULL;
}

function *counted_function(const void *address)
{
    for (int i = 0; i < COUNT; i++)
        if (*ALL[i].real == address)
            return ALL[i].stub;
    return NULL;
}

void note_uses_in(struct control *control)
{
    atomic_store(&kybernate_watched, control ? &control->watched : &never);
}

void kybernate_note(void)
{
    if (atomic_load(&kybernate_watched) == &at_first) {
        driver(); /* and with it the functions that the stubs jump to */
        if (!driver()->complete || !blocks_ready())
            note_uses_in(NULL);
    }
    note_use();
}

void note_use(void)
{
    struct control *control = blocks_control();
    if (!control || !atomic_load_explicit(&control->watched, memory_order_relaxed) ||
        !atomic_exchange(&control->watched, 0))
        return;
    atomic_fetch_add(&control->uses, 1);
    syscall(SYS_futex, &control->uses, WAKE, INT_MAX, NULL, NULL, 0);
}

#else /* calls are not seen here: the node looks at the threads from outside */

void find_used(function *(*lookup)(void *library, const char *symbol), void *library)
{
    (void)lookup, (void)library;
}

function *counted_symbol(const char *symbol)
{
    (void)symbol;
    return NULL;
}

function *counted_function(const void *address)
{
    (void)address;
    return NULL;
}

void note_uses_in(struct control *control)
{
    (void)control;
}

void note_use(void)
{
}

#endif
