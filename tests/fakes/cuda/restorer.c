/* The restore thread inside a program: answers the verbs and keeps the state machine. A test double: see abi.h. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "mailbox.h"
#include "memory.h"
#include "switches.h"
#include "virtual.h"

/* From which state each verb is legal, and where it leads. */
static const struct {
    CUprocessState from, to;
} MOVES[VERBS] = {
    [LOCK] = {RUNNING, LOCKED},
    [CHECKPOINT] = {LOCKED, CHECKPOINTED},
    [RESTORE] = {CHECKPOINTED, LOCKED},
    [UNLOCK] = {LOCKED, RUNNING},
};

static CUprocessState state = RUNNING;
static bool lost; /* a restore failed: from then on the real driver answers OPERATING_SYSTEM and never recovers */

static int find_gpu(const struct device *gpus, int count, const CUuuid *wanted)
{
    for (int i = 0; i < count; i++)
        if (memcmp(&gpus[i].uuid, wanted, sizeof *wanted) == 0)
            return i;
    return -1;
}

/*
 * Read a GPU map: it must name every GPU that the program could open at cuInit, or it is INVALID_VALUE. What the
 * program could open it must be able to open again, there or where the map puts it, or it is NOT_SUPPORTED.
 */
static CUresult read_moves(const struct question *question, const struct machine *machine, int moves[MAX_GPUS])
{
    struct device here[MAX_GPUS];
    bool taken[MAX_GPUS] = {false}, named[MAX_GPUS] = {false};
    for (int i = 0; i < MAX_GPUS; i++)
        moves[i] = i;
    for (int i = 0; i < machine->count; i++)
        here[i] = (struct device){i, machine->gpus[i].uuid};
    if (question->pair_count && question->pair_count != (uint32_t)process.known_count)
        return CUDA_ERROR_INVALID_VALUE;
    for (uint32_t i = 0; i < question->pair_count; i++) {
        int old = find_gpu(process.known, process.known_count, &question->pairs[i].old);
        int new = find_gpu(here, machine->count, &question->pairs[i].new);
        if (old < 0 || new < 0 || named[old] || taken[new])
            return CUDA_ERROR_INVALID_VALUE;
        named[old] = taken[new] = true;
        moves[process.known[old].place] = new;
    }
    for (int i = 0; i < process.known_count; i++)
        if (!can_open(moves[process.known[i].place]))
            return CUDA_ERROR_NOT_SUPPORTED;
    return CUDA_SUCCESS;
}

static CUresult restore(const struct question *question)
{
    struct machine machine;
    int moves[MAX_GPUS];
    if (lost || !read_machine(&machine))
        return CUDA_ERROR_OPERATING_SYSTEM;
    CUresult result = read_moves(question, &machine, moves);
    if (result)
        return result;
    for (int i = 0; i < process.count; i++)
        if (moves[process.devices[i].place] >= machine.count)
            return CUDA_ERROR_INVALID_DEVICE;
    bool lacking = has_managed_memory() || maps_imported_memory();
    result = lacking ? CUDA_ERROR_NOT_SUPPORTED : move_to_gpus(&machine, moves);
    if (result) {
        lost = true;
        return result;
    }
    for (int i = 0; i < process.count; i++)
        process.devices[i].place = moves[process.devices[i].place];
    for (int i = 0; i < process.known_count; i++) {
        int place = moves[process.known[i].place];
        process.known[i] = (struct device){place, machine.gpus[place].uuid};
    }
    return CUDA_SUCCESS;
}

static CUresult perform(const struct question *question)
{
    if (question->verb == STATE)
        return CUDA_SUCCESS;
    if (state != MOVES[question->verb].from)
        return CUDA_ERROR_ILLEGAL_STATE;
    CUresult result = CUDA_SUCCESS;
    switch (question->verb) {
    case LOCK:
        result = shut_gate(question->timeout_ms) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
        break;
    case CHECKPOINT:
        result = move_to_host();
        break;
    case RESTORE:
        result = restore(question);
        break;
    case UNLOCK:
        open_gate();
        break;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (result == CUDA_SUCCESS)
        state = MOVES[question->verb].to;
    return result;
}

static void *answer_verbs(void *argument)
{
    struct mailbox *mailbox = argument;
    const struct timespec pause = {0, 1000000};
    prctl(PR_SET_NAME, "cuda00001400006"); /* as the real driver names it */
    mailbox->tid = (int32_t)syscall(SYS_gettid);
    mailbox->magic = MAILBOX_MAGIC;
    for (;; nanosleep(&pause, NULL)) {
        uint32_t asked = atomic_load(&mailbox->asked);
        if (asked == atomic_load(&mailbox->answered))
            continue;
        if (mailbox->question.stuck)
            hang();
        mailbox->result = perform(&mailbox->question);
        mailbox->state = state;
        atomic_store(&mailbox->answered, asked);
    }
    return NULL;
}

CUresult start_restorer(void)
{
    const char *switches = getenv("FAKE_CUDA_FAIL");
    struct mailbox *mailbox = mmap((void *)MAILBOX_ADDRESS, PAGE, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (mailbox != (void *)MAILBOX_ADDRESS)
        return CUDA_ERROR_OPERATING_SYSTEM;
    madvise(mailbox, PAGE, MADV_DONTFORK); /* a forked child holds no CUDA state */
    snprintf(mailbox->switches, sizeof mailbox->switches, "%s", switches ? switches : "");

    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* the program's signals are not this thread's */
    int failed = pthread_create(&thread, NULL, answer_verbs, mailbox);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed)
        return CUDA_ERROR_OPERATING_SYSTEM;
    pthread_detach(thread);
    while (((volatile struct mailbox *)mailbox)->magic != MAILBOX_MAGIC)
        usleep(100);
    return CUDA_SUCCESS;
}
