/* The four verbs and the two queries, as their caller runs them on another process. A test double: see abi.h. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "mailbox.h"
#include "process.h"
#include "switches.h"

static const char *const NAMES[VERBS] = {"state", "tid", "lock", "checkpoint", "restore", "unlock"};

/* The codes that driver 580 was measured to give: OPERATING_SYSTEM for no such process, NOT_INITIALIZED for one
 * without CUDA. */
static CUresult transferred(ssize_t moved, size_t size)
{
    if (moved == (ssize_t)size)
        return CUDA_SUCCESS;
    return moved < 0 && errno == ESRCH ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_ERROR_NOT_INITIALIZED;
}

static CUresult peek(int pid, struct mailbox *mailbox)
{
    struct iovec here = {mailbox, sizeof *mailbox}, there = {(void *)MAILBOX_ADDRESS, sizeof *mailbox};
    if (pid <= 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    CUresult result = transferred(process_vm_readv(pid, &here, 1, &there, 1, 0), sizeof *mailbox);
    if (result == CUDA_SUCCESS && mailbox->magic != MAILBOX_MAGIC)
        result = CUDA_ERROR_NOT_INITIALIZED;
    return result;
}

static CUresult poke(int pid, size_t offset, void *data, size_t size)
{
    struct iovec here = {data, size}, there = {(char *)MAILBOX_ADDRESS + offset, size};
    return transferred(process_vm_writev(pid, &here, 1, &there, 1, 0), size);
}

/* Keep other callers from this target until the descriptor is closed, also by the caller's death. */
static int lock_target(int pid)
{
    char path[512];
    struct flock range = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = pid, .l_len = 1};
    state_path(path, sizeof path, "callers");
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd >= 0)
        while (fcntl(fd, F_OFD_SETLKW, &range) < 0 && errno == EINTR)
            ;
    return fd;
}

/* Wait until the target has answered everything it was asked; ends with the target's death, else never. */
static CUresult wait_for_answer(int pid, struct mailbox *mailbox)
{
    for (useconds_t pause = 100;; pause = pause < 5000 ? pause * 2 : 5000) {
        CUresult result = peek(pid, mailbox);
        if (result || mailbox->asked == mailbox->answered)
            return result;
        usleep(pause);
    }
}

static CUresult ask(int pid, struct question *question, struct mailbox *mailbox)
{
    CUresult result = wait_for_answer(pid, mailbox); /* of a caller that was killed */
    if (result)
        return result;
    uint32_t asked = mailbox->asked + 1;
    result = poke(pid, offsetof(struct mailbox, question), question, sizeof *question);
    if (result == CUDA_SUCCESS)
        result = poke(pid, offsetof(struct mailbox, asked), &asked, sizeof asked);
    if (result == CUDA_SUCCESS)
        result = wait_for_answer(pid, mailbox);
    return result ? result : mailbox->result;
}

/* Count this call and say what the switches want of it. */
static struct switched count_call(int pid, enum verb verb, struct mailbox *mailbox)
{
    struct counted calls = mailbox->calls[verb];
    record_call(NAMES[verb], pid);
    count(&calls);
    poke(pid, offsetof(struct mailbox, calls) + verb * sizeof calls, &calls, sizeof calls);
    return switched_counted(mailbox->switches, NAMES[verb], calls, pid);
}

static CUresult call(int pid, struct question *question, struct mailbox *mailbox)
{
    if (!process.started)
        return CUDA_ERROR_NOT_INITIALIZED;
    CUresult result = peek(pid, mailbox);
    if (result)
        return result;
    int fd = lock_target(pid);
    result = peek(pid, mailbox);
    struct switched what = {GO, CUDA_SUCCESS};
    if (result == CUDA_SUCCESS) {
        what = count_call(pid, question->verb, mailbox);
        act_before(what);
        question->stuck = what.action == STUCK;
        if (what.action == ERROR)
            result = what.error;
        else if (question->verb != RESTORE_TID) /* the real driver reports the thread of a stopped process, too */
            result = ask(pid, question, mailbox);
    }
    if (what.action == HANG_AFTER)
        hang();
    if (fd >= 0)
        close(fd);
    return result;
}

/* Translate the restore thread's id into this process's pid namespace. */
static int thread_here(int pid, int tid)
{
    char path[64], line[256];
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *tasks = opendir(path);
    int found = -1;
    for (struct dirent *entry; tasks && found < 0 && (entry = readdir(tasks));) {
        char status[400];
        snprintf(status, sizeof status, "%s/%s/status", path, entry->d_name);
        FILE *file = entry->d_name[0] == '.' ? NULL : fopen(status, "re");
        while (file && fgets(line, sizeof line, file))
            if (strncmp(line, "NSpid:", 6) == 0 && atoi(strrchr(line, '\t') + 1) == tid)
                found = atoi(entry->d_name);
        if (file)
            fclose(file);
    }
    if (tasks)
        closedir(tasks);
    return found;
}

EXPORT CUresult cuCheckpointProcessGetState(int pid, CUprocessState *result)
{
    struct question question = {.verb = STATE};
    struct mailbox mailbox;
    CUresult failed = call(pid, &question, &mailbox);
    if (failed == CUDA_SUCCESS)
        *result = (CUprocessState)mailbox.state;
    return failed;
}

EXPORT CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid)
{
    struct question question = {.verb = RESTORE_TID};
    struct mailbox mailbox;
    CUresult failed = call(pid, &question, &mailbox);
    if (failed)
        return failed;
    *tid = thread_here(pid, mailbox.tid);
    return *tid < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

EXPORT CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *arguments)
{
    struct question question = {.verb = LOCK, .timeout_ms = arguments ? arguments->timeout_ms : 0};
    struct mailbox mailbox;
    return call(pid, &question, &mailbox);
}

EXPORT CUresult cuCheckpointProcessCheckpoint(int pid, void *arguments)
{
    (void)arguments;
    struct question question = {.verb = CHECKPOINT};
    struct mailbox mailbox;
    return call(pid, &question, &mailbox);
}

EXPORT CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *arguments)
{
    struct question question = {.verb = RESTORE, .pair_count = arguments ? arguments->pair_count : 0};
    struct mailbox mailbox;
    if (question.pair_count > MAX_GPUS)
        return CUDA_ERROR_INVALID_VALUE;
    for (uint32_t i = 0; i < question.pair_count; i++)
        question.pairs[i] = arguments->pairs[i];
    return call(pid, &question, &mailbox);
}

EXPORT CUresult cuCheckpointProcessUnlock(int pid, void *arguments)
{
    (void)arguments;
    struct question question = {.verb = UNLOCK};
    struct mailbox mailbox;
    return call(pid, &question, &mailbox);
}
