/* Reads the failure switches. A test double: see switches.h. */
#include "switches.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cards.h"

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
    } ACTIONS[] = {{"hang", HANG}, {"hang-after", HANG_AFTER}, {"stuck", STUCK}, {"crash", CRASH}};

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

struct switched switched(const char *target, const char *verb, unsigned nth, int pid)
{
    char machine[4096];
    struct switched found = look_up(target, verb, nth, pid);
    if (found.action == GO && read_state("fail", machine, sizeof machine))
        found = look_up(machine, verb, nth, pid);
    return found;
}

void act_before(struct switched what)
{
    if (what.action == HANG)
        hang();
    if (what.action == CRASH) {
        signal(SIGSEGV, SIG_DFL);
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
