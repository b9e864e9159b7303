/* join-user: has CRIU begin a restored container in a user namespace that exists already: the pod's.
 *
 * CRIU makes the user namespace of its image again. A pod's network namespace belongs to the pod's own user namespace,
 * and no process of another one may join it; and CRIU's --join-ns enters a user namespace too late, when the
 * namespaces of mounts and processes belong to the node's already. So CRIU's first process is begun by a helper that has
 * entered the pod's: whatever CRIU creates with it belongs to that one. Its ids are mapped since the pod's start, so the
 * two files to which CRIU writes the image's maps are /dev/null instead.
 *
 * Preloaded into CRIU by the environment, through the OCI runtime; there and in what CRIU executes it does nothing.
 * Sources: CRIU's clone-noasan.c, cr-restore.c (restore_root_task, sigchld_handler), namespaces.c (prepare_userns,
 * write_id_map) of versions 4.1 and 4.2; clone(2), setns(2), user_namespaces(7).
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define NAMESPACE "KYBERNATE_USER_NAMESPACE"

typedef int opener(int, const char *, int, ...);

static long (*kernel)(long, ...);
static opener *open_file;
static int begun;

__attribute__((constructor)) static void begin(void)
{
	kernel = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
	open_file = (opener *)dlsym(RTLD_NEXT, "openat");
}

/* In the helper: enter the namespace and begin the process there. Returns 0 in the new process, and else never. */
static long begin_inside(const char *path, const struct clone_args *wanted, size_t size, volatile long *result)
{
	struct clone_args inside = *wanted;
	int fd = open_file(AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
	long pid;

	/* CRIU's child, with the helper's signal, SIGCHLD: when CRIU ends, the shim inherits it as it does others. */
	inside.flags = (inside.flags & ~(uint64_t)CLONE_NEWUSER) | CLONE_PARENT;
	inside.exit_signal = 0;
	if (fd < 0 || setns(fd, CLONE_NEWUSER)) {
		*result = -errno;
		_exit(1);
	}
	close(fd);
	pid = kernel(SYS_clone3, &inside, size);
	if (!pid)
		return 0;
	*result = pid < 0 ? -errno : pid;
	_exit(0);
}

/* Begin a process as clone3 does, in the namespace at `path` instead of in a new one. */
static long clone_inside(const char *path, const struct clone_args *wanted, size_t size)
{
	struct clone_args plain = { .exit_signal = SIGCHLD };
	volatile long *result;
	sigset_t child, before;
	long pid, found;

	result = mmap(NULL, sizeof(*result), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (result == MAP_FAILED)
		return -1;
	*result = -ECHILD;
	/* CRIU gives up when a child ends that it does not know: the helper has gone before CRIU may look. */
	sigemptyset(&child);
	sigaddset(&child, SIGCHLD);
	sigprocmask(SIG_BLOCK, &child, &before);
	pid = kernel(SYS_clone3, &plain, sizeof(plain));
	if (!pid) {
		begin_inside(path, wanted, size, result);
		munmap((void *)result, sizeof(*result));
		sigprocmask(SIG_SETMASK, &before, NULL);
		return 0;
	}
	while (pid > 0 && waitpid((pid_t)pid, NULL, 0) < 0 && errno == EINTR)
		;
	found = pid < 0 ? -errno : *result;
	munmap((void *)result, sizeof(*result));
	sigprocmask(SIG_SETMASK, &before, NULL);
	if (found < 0) {
		errno = (int)-found;
		return -1;
	}
	begun = 1;
	return found;
}

long syscall(long number, ...)
{
	const char *path = getenv(NAMESPACE);
	const struct clone_args *wanted;
	long given[6];
	va_list list;

	va_start(list, number);
	for (int place = 0; place < 6; place++)
		given[place] = va_arg(list, long);
	va_end(list);
	wanted = (const struct clone_args *)given[0];
	/* The whole structure, as CRIU has it: others ask the kernel what it knows. */
	if (path && number == SYS_clone3 && (size_t)given[1] <= sizeof(*wanted) &&
	    (size_t)given[1] >= CLONE_ARGS_SIZE_VER1 && wanted && wanted->flags & CLONE_NEWUSER)
		return clone_inside(path, wanted, (size_t)given[1]);
	return kernel(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}

/* Open a file as the C library does, but for those whose content, the maps of ids, is there already. */
static int opened(int directory, const char *path, int flags, mode_t mode)
{
	if (begun && directory != AT_FDCWD && (!strcmp(path, "uid_map") || !strcmp(path, "gid_map")))
		return open_file(AT_FDCWD, "/dev/null", flags, mode);
	return open_file(directory, path, flags, mode);
}

int openat(int directory, const char *path, int flags, ...)
{
	va_list list;
	mode_t mode = 0;

	va_start(list, flags);
	if (flags & (O_CREAT | (O_TMPFILE & ~O_DIRECTORY)))
		mode = va_arg(list, mode_t);
	va_end(list);
	return opened(directory, path, flags, mode);
}

int openat64(int directory, const char *path, int flags, ...) __attribute__((alias("openat")));

/* What the C library's headers make of a call without a mode, with -D_FORTIFY_SOURCE. */
int __openat_2(int directory, const char *path, int flags);
int __openat_2(int directory, const char *path, int flags)
{
	return opened(directory, path, flags, 0);
}

int __openat64_2(int directory, const char *path, int flags) __attribute__((alias("__openat_2")));
