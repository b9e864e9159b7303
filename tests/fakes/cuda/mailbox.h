/* How a caller of the four verbs reaches the driver inside another process: a page at a fixed address.
 *
 * The caller writes its question into the target's page by process_vm_writev(2) and waits until the target's restore
 * thread, which polls the page, has answered. So a target needs no descriptor, no file and no socket to be driven,
 * nothing that CRIU would have to carry; a frozen or stopped target does not answer, as with the real driver; and a
 * caller needs no more than the pid as it sees it. A test double: see abi.h.
 */
#ifndef FAKE_CUDA_MAILBOX_H
#define FAKE_CUDA_MAILBOX_H

#include <stdatomic.h>
#include <stdint.h>

#include "gpus.h"
#include "switches.h"

enum verb { STATE, RESTORE_TID, LOCK, CHECKPOINT, RESTORE, UNLOCK, VERBS };

/* Far from where Linux puts programs, libraries and stacks, on x86-64 and arm64 alike. */
#define MAILBOX_ADDRESS ((uintptr_t)0x3fca00000000)
#define MAILBOX_MAGIC 0x31584f424c49414dull /* "MAILBOX1" */

struct question {
    enum verb verb;
    uint32_t timeout_ms;
    uint32_t stuck; /* a switch: never answer */
    uint32_t pair_count;
    CUcheckpointGpuPair pairs[MAX_GPUS];
};

struct mailbox {
    uint64_t magic;
    int32_t tid; /* of the restore thread, in the target's own pid namespace */
    int32_t result;
    int32_t state;
    _Atomic uint32_t asked, answered; /* equal while nothing is in progress */
    struct question question;
    struct counted calls[VERBS]; /* by the callers, for the switches */
    char switches[512];    /* the target's FAKE_CUDA_FAIL */
};

_Static_assert(sizeof(struct mailbox) <= PAGE, "the mailbox is one page");

#endif
