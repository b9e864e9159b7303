/* Switches that make the pretended driver fail, hang, crash or crawl. A test double: see abi.h.
 *
 * A switch is VERB:N:WHAT[@PID]; several are separated by commas or newlines. They stand in FAKE_CUDA_FAIL of the
 * target's environment (read at its cuInit) or in the file `fail` of the state directory (read at every call).
 *   VERB  init state tid lock checkpoint restore unlock; vmm (any call on virtual memory), launch (of a kernel)
 *   N     the N-th call of this verb on this process, or * for every one; of vmm and launch, the N-th call by it
 *   WHAT  an error code (left out: 999), which is given without doing anything,
 *         hang        the caller hangs before anything is done
 *         hang-after  the caller hangs when it has been done
 *         stuck       the target never answers: nobody can help it any more
 *         crash       the caller dies of SIGSEGV
 *   PID   only this process, by the pid that the caller uses
 * Other switches are files too: `missing` holds names of calls that this driver does not have, `seconds-per-gib` (or
 * FAKE_CUDA_SECONDS_PER_GIB of the target) the time that checkpoint and restore take.
 */
#ifndef FAKE_CUDA_SWITCHES_H
#define FAKE_CUDA_SWITCHES_H

#include <stdbool.h>
#include <stdint.h>

#include "abi.h"

enum action { GO, ERROR, HANG, HANG_AFTER, STUCK, CRASH };

struct switched {
    enum action action;
    CUresult error;
};

/* What is switched for the `nth` call of `verb` on `pid`: by `target` (its FAKE_CUDA_FAIL) or by the state directory. */
struct switched switched(const char *target, const char *verb, unsigned nth, int pid);

/* Do what has to be done before the call: hang, crash, or nothing. */
void act_before(struct switched what);

bool call_is_missing(const char *name);
double seconds_per_gib(void);
_Noreturn void hang(void);

#endif
