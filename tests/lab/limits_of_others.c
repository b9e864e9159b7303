/* limits_of_others: lets a root without CAP_SYS_RESOURCE read the resource limits of other users' processes.
 *
 * prlimit(2) of another user's process needs that capability even to read, and CRIU asks by it for every process that
 * it dumps. /proc/PID/limits shows the same figures to root. So a question that the kernel refuses with EPERM, and that
 * sets nothing, is answered from there. Whatever sets a limit is passed on as it is, with the kernel's own answer: at a
 * restore each process sets its limits itself, by system calls that do not pass through here.
 *
 * Preloaded into CRIU by tests/lab/criu_limits.py. Programs that CRIU executes are not preloaded.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { NAME = 26, FIGURE = 21 }; /* the widths of /proc/PID/limits' columns (proc_pid_limits in the kernel's fs/proc) */

static long (*kernel)(long, ...);

__attribute__((constructor)) static void begin(void)
{
	kernel = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
	unsetenv("LD_PRELOAD");
}

/* Return whether `text` begins with a figure of the file, and put it into `limit`. */
static int parsed(const char *text, rlim64_t *limit)
{
	char *end;

	if (!strncmp(text, "unlimited ", 10)) {
		*limit = RLIM64_INFINITY;
		return 1;
	}
	errno = 0;
	*limit = strtoull(text, &end, 10);
	return end != text && *end == ' ' && !errno;
}

/* Read both limits of a kind; the rows are in the order of the kernel's numbers, below one that names the columns. */
static int from_proc(pid_t pid, unsigned int resource, struct rlimit64 *found)
{
	char path[64], line[128];
	struct rlimit64 read;
	unsigned int row = 0;
	int known = 0;
	FILE *file;

	snprintf(path, sizeof(path), "/proc/%d/limits", pid);
	file = fopen(path, "re");
	if (!file)
		return -1;
	while (!known && fgets(line, sizeof(line), file))
		if (row++ == resource + 1)
			known = strlen(line) > NAME + 2 * FIGURE && parsed(line + NAME, &read.rlim_cur) &&
				parsed(line + NAME + FIGURE, &read.rlim_max);
	fclose(file);
	if (!known)
		return -1;
	*found = read;
	return 0;
}

long syscall(long number, ...)
{
	long given[6], result;
	va_list list;

	va_start(list, number);
	for (int place = 0; place < 6; place++)
		given[place] = va_arg(list, long);
	va_end(list);
	result = kernel(number, given[0], given[1], given[2], given[3], given[4], given[5]);
	if (number != SYS_prlimit64 || result != -1 || errno != EPERM || given[2] || !given[3])
		return result;
	if (!from_proc((pid_t)given[0], (unsigned int)given[1], (struct rlimit64 *)given[3]))
		return 0;
	errno = EPERM;
	return -1;
}
