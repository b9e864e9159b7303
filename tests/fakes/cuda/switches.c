/* Reads the failure switches. A test double: see switches.h. */
#include "switches.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gpus.h"

_Noreturn void hang(void)
{
    for (;;)
        pause();
}

static struct switched parse_what(const char *what)
{
    static const struct {
        const char *name;
        enum action action;
    } ACTIONS[] = {{"hang", HANG},   {"hang-after", HANG_AFTER}, {"hold", HOLD},
                   {"stuck", STUCK}, {"crash", CRASH},           {"kill", KILL}};

    for (size_t i = 0; i < sizeof ACTIONS / sizeof *ACTIONS; i++)
        if (strcmp(what, ACTIONS[i].name) == 0)
            return (struct switched){ACTIONS[i].action, CUDA_SUCCESS};
    return (struct switched){ERROR, *what ? atoi(what) : CUDA_ERROR_UNKNOWN};
}

static struct switched look_up(const char *switches, const char *verb, unsigned nth, int pid)
{
    char text[4096], *rest = text, *one;
    snprintf(text, sizeof text, "%s", switches);
    while ((one = strsep(&rest, ",\n"))) {
        char *at = strchr(one, '@');
        if (at)
            *at++ = '\0';
        const char *name = strsep(&one, ":"), *count = strsep(&one, ":");
        bool this_call = count && (strcmp(count, "*") == 0 || strtoul(count, NULL, 10) == nth);
        if (strcmp(name, verb) == 0 && this_call && (!at || atoi(at) == pid))
            return parse_what(one ? one : "");
    }
    return (struct switched){GO, CUDA_SUCCESS};
}

static struct switched look_up_twice(const char *target, const char *verb, uint32_t ever, uint32_t since, int pid)
{
    char machine[4096];
    struct switched found = look_up(target, verb, ever, pid);
    if (found.action == GO && read_state("fail", machine, sizeof machine))
        found = look_up(machine, verb, since, pid);
    return found;
}

struct switched switched(const char *target, const char *verb, unsigned nth, int pid)
{
    return look_up_twice(target, verb, nth, nth, pid);
}

struct switched switched_counted(const char *target, const char *verb, struct counted calls, int pid)
{
    return look_up_twice(target, verb, calls.ever, calls.since, pid);
}

/* Another number for every file that was put in place as `fail`; 0 while there is none. */
static uint64_t stamp(void)
{
    char path[512];
    struct stat about;
    state_path(path, sizeof path, "fail");
    if (stat(path, &about) < 0)
        return 0;
    return (uint64_t)about.st_mtim.tv_sec * 1000000000 + (uint64_t)about.st_mtim.tv_nsec + about.st_ino;
}

void count(struct counted *calls)
{
    uint64_t now = stamp();
    if (calls->since_stamp != now)
        calls->since = 0;
    calls->since_stamp = now;
    calls->since++;
    calls->ever++;
}

void record_call(const char *call, int target)
{
    char path[512], thread[16] = "", line[128];
    state_path(path, sizeof path, "calls");
    int fd = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
    if (fd < 0)
        return;
    prctl(PR_GET_NAME, thread);
    int size = snprintf(line, sizeof line, "%d %s %d %s\n", getpid(), call, target, thread);
    if (write(fd, line, (size_t)size) != size)
        abort(); /* or the recording would lack a call */
    close(fd);
}

struct switched switched_function(const char *name)
{
    enum { MOST = 128 };
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static struct {
        const char *name; /* one of __func__, which stays */
        struct counted calls;
    } functions[MOST];
    struct counted calls = {0};
    record_call(name, 0);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST; i++)
        if (!functions[i].name || functions[i].name == name) {
            functions[i].name = name;
            count(&functions[i].calls);
            calls = functions[i].calls;
            break;
        }
    pthread_mutex_unlock(&lock);
    return switched_counted("", name, calls, getpid());
}

static void hold(void)
{
    for (uint64_t before = stamp(); stamp() == before;)
        usleep(2000);
}

void act_before(struct switched what)
{
    if (what.action == HANG)
        hang();
    if (what.action == HOLD)
        hold();
    if (what.action == KILL)
        raise(SIGKILL);
    if (what.action == CRASH) {
        sigset_t one;
        sigemptyset(&one);
        sigaddset(&one, SIGSEGV);
        signal(SIGSEGV, SIG_DFL);
        pthread_sigmask(SIG_UNBLOCK, &one, NULL); /* the preload library's thread blocks all; a real fault is forced */
        raise(SIGSEGV);
    }
}

bool call_is_missing(const char *name)
{
    char text[4096], *rest = text, *one;
    if (!read_state("missing", text, sizeof text))
        return false;
    while ((one = strsep(&rest, " \n")))
        if (strcmp(one, name) == 0)
            return true;
    return false;
}

double seconds_per_gib(void)
{
    char text[64];
    const char *mine = getenv("FAKE_CUDA_SECONDS_PER_GIB");
    if (mine)
        return atof(mine);
    return read_state("seconds-per-gib", text, sizeof text) ? atof(text) : 0;
}
