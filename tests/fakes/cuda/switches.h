/* Switches that make the pretended driver fail, hang, crash or crawl. A test double: see abi.h.
 *
 * A switch is VERB:N:WHAT[@PID]; several are separated by commas or newlines. They stand in FAKE_CUDA_FAIL of the
 * target's environment (read at its cuInit) or in the file `fail` of the state directory (read at every call).
 *   VERB  init state tid lock checkpoint restore unlock; vmm (any call on virtual memory), launch (of a kernel);
 *         in the file also a function of the driver, such as cuMemMap
 *   N     the N-th call of this verb on this process, or * for every one; of vmm, launch and functions, the N-th call
 *         by it. In the file, all but launches count from when the file was written
 *   WHAT  an error code (left out: 999), which is given without doing anything,
 *         hang        the caller hangs before anything is done
 *         hang-after  the caller hangs when it has been done (verbs only)
 *         hold        the caller waits before anything is done, until the switches are changed
 *         stuck       the target never answers: no process can help it any more (verbs only)
 *         crash       the caller dies of SIGSEGV
 *         kill        the caller is killed by SIGKILL
 *   PID   only this process, by the pid that the caller uses; of vmm and a function, only if this process calls it
 * While there is a file `calls`, each call of a verb or a function adds a line to it, see `record_call`.
 * Other switches are files too: `missing` holds names of calls that this driver does not have, `seconds-per-gib` (or
 * FAKE_CUDA_SECONDS_PER_GIB of the target) the time that checkpoint and restore take.
 */
#ifndef FAKE_CUDA_SWITCHES_H
#define FAKE_CUDA_SWITCHES_H

#include <stdbool.h>
#include <stdint.h>

#include "abi.h"

enum action { GO, ERROR, HANG, HANG_AFTER, HOLD, STUCK, CRASH, KILL };

struct switched {
    enum action action;
    CUresult error;
};

/* How often something was called: `ever`, and since the switches with the stamp `since_stamp` were written. */
struct counted {
    uint32_t ever, since;
    uint64_t since_stamp;
};

/* Count a call. */
void count(struct counted *calls);

/* What is switched for the `nth` call of `verb` on `pid`: by `target` (its FAKE_CUDA_FAIL) or by the state directory. */
struct switched switched(const char *target, const char *verb, unsigned nth, int pid);

/* The same for what is counted: by `target` since ever, by the state directory since that was written. */
struct switched switched_counted(const char *target, const char *verb, struct counted calls, int pid);

/* Count, record and look up a call of one of the driver's functions by this process. */
struct switched switched_function(const char *name);

/* Add "PID CALL TARGET THREAD" to the file `calls`: the caller's pid, 0 or whom a verb is for, its thread's name. */
void record_call(const char *call, int target);

/* Do what has to be done before the call: hang, crash, or nothing. */
void act_before(struct switched what);

bool call_is_missing(const char *name);
double seconds_per_gib(void);
_Noreturn void hang(void);

#endif
