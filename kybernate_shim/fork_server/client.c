/* containerd-shim-kybernate-v1: what containerd executes for every container, once to `start` and once to `delete`, and
 * for `-info`.
 *
 * It is in C because an interpreter needs longer to start than all of its work takes. It hands the call to the fork
 * server and ensures that the call is done once or not at all. Where it is not done, an interpreter takes this process
 * over.
 * One connection is one call, and one packet is one message:
 *
 *     server: the pid of the process that will do it
 *     client: the words of the command line, with descriptors 0, 1 and 2
 *     server: an exit status, and what is to be printed
 *     client: TAKEN, after a `start` that succeeded; the daemon ends if it never comes
 *
 * Whatever goes wrong, the interpreter does the work. Nothing may then be left of what the other side has begun: it
 * works only if it could send its pid here, and a process whose pid is here and that does not answer is killed. A
 * server that does not even fork is killed, too, for the next call to find a new one; but not one that has forked for
 * other clients meanwhile, or waits for a CPU: the node is busy. Descriptors are sent to a known
 * process only: those in a queue that no process reads would keep containerd waiting for the end of our output.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define NAME "containerd-shim-kybernate-v1"
#define TAKEN "taken"
#define UNLIKE 255 /* in place of an exit status: the forked process could not be made what this one is */
#define LARGEST_ANSWER (1 << 16)
#define LARGEST_FILE (1 << 12)
#define MOST_WORDS 256

/* Milliseconds until the pid comes, and until the work is done. containerd gives `delete` five seconds in all; `-info`
 * waits for the OCI runtime, see info.py. */
#ifndef PATIENCE
#define PATIENCE {{5000, 20000}, {1500, 4800}, {1500, 12000}}
#endif

/* What this program belongs to. launcher.py writes the values over these names into a copy of the program. */
#define PATH_BYTES 4096
char interpreter[PATH_BYTES] = "@interpreter@";
char packages[PATH_BYTES] = "@packages@";
char directory[PATH_BYTES] = "@directory@";

#define ENTER "import sys; sys.path.append(sys.argv.pop(1)); from kybernate_shim import __main__ as program; program."
static char run_code[] = ENTER "run_launched()";
static char leave_code[] = ENTER "leave_server()";

enum action { START, DELETE, INFO, OTHER };
enum outcome { DONE, NO_SERVER, NOT_DONE };

struct call {
	enum action action;
	int count;
	char **words;
	int status;
	char why[512]; /* not done */
};

extern char **environ;

static enum outcome refuse(struct call *call, enum outcome outcome, const char *why, int error)
{
	snprintf(call->why, sizeof call->why, error ? "%s: %s" : "%s", why, strerror(error));
	return outcome;
}

/* -- where the fork server listens -------------------------------------------------------------------------------- */

static bool add_identity(char *facts, size_t size, const char *path, bool of_content)
{
	struct stat status;

	if (stat(path, &status))
		return false;
	const struct timespec *time = of_content ? &status.st_mtim : &status.st_ctim;
	size_t length = strlen(facts);
	snprintf(facts + length, size - length, "%ju %ju %jd ", (uintmax_t)status.st_dev, (uintmax_t)status.st_ino,
		 (intmax_t)time->tv_sec * 1000000000 + time->tv_nsec);
	return true;
}

/* Must give what place.py does. */
static bool server_address(struct sockaddr_un *address)
{
	char facts[512] = "", package[PATH_BYTES + sizeof "/kybernate_shim/__init__.py"];
	struct stat mounts;
	uint64_t hash = 0xcbf29ce484222325; /* FNV-1a */

	snprintf(package, sizeof package, "%s/kybernate_shim/__init__.py", packages);
	if (!add_identity(facts, sizeof facts, package, false) || !add_identity(facts, sizeof facts, packages, true) ||
	    !add_identity(facts, sizeof facts, interpreter, false) || stat("/proc/self/ns/mnt", &mounts))
		return false;
	size_t length = strlen(facts);
	snprintf(facts + length, sizeof facts - length, "%ju", (uintmax_t)mounts.st_ino);
	for (const char *byte = facts; *byte; byte++)
		hash = (hash ^ (unsigned char)*byte) * 0x100000001b3;
	address->sun_family = AF_UNIX;
	size_t size = sizeof address->sun_path;
	return (size_t)snprintf(address->sun_path, size, "%s/%016" PRIx64, directory, hash) < size;
}

/* -- one call ----------------------------------------------------------------------------------------------------- */

/* Read a packet in time. Returns its size, 0 at the end of the connection, or -1 with errno, ETIMEDOUT among them. */
static ssize_t receive(int connection, void *answer, int milliseconds)
{
	struct pollfd readable = {.fd = connection, .events = POLLIN};
	int ready;

	while ((ready = poll(&readable, 1, milliseconds)) < 0 && errno == EINTR)
		;
	if (!ready)
		errno = ETIMEDOUT;
	return ready > 0 ? recv(connection, answer, LARGEST_ANSWER, 0) : -1;
}

static pid_t pid_in(char *answer, ssize_t size)
{
	if (size <= 0)
		return 0;
	answer[size < LARGEST_ANSWER ? size : LARGEST_ANSWER - 1] = 0;
	return (pid_t)strtol(answer, NULL, 10);
}

static bool send_call(int connection, const struct call *call)
{
	static const int standard[] = {0, 1, 2};
	union {
		struct cmsghdr aligned;
		char bytes[CMSG_SPACE(sizeof standard)];
	} control = {0};
	struct iovec parts[2 * MOST_WORDS];
	struct msghdr message = {
		.msg_iov = parts,
		.msg_control = &control,
		.msg_controllen = sizeof control,
	};

	if (call->count > MOST_WORDS) {
		errno = E2BIG;
		return false;
	}
	for (int word = 0; word < call->count; word++) {
		if (word)
			parts[message.msg_iovlen++] = (struct iovec){.iov_base = "", .iov_len = 1};
		parts[message.msg_iovlen++] = (struct iovec){call->words[word], strlen(call->words[word])};
	}
	control.aligned.cmsg_level = SOL_SOCKET;
	control.aligned.cmsg_type = SCM_RIGHTS;
	control.aligned.cmsg_len = CMSG_LEN(sizeof standard);
	memcpy(CMSG_DATA(&control.aligned), standard, sizeof standard);
	return sendmsg(connection, &message, MSG_NOSIGNAL) >= 0;
}

/* The process that the server has forked last, and that lives; 0 without one. It is another one once a client is served.
 * The kernel lists children in the order in which they were forked. Source: proc_pid_task(5). */
static pid_t newest_child(pid_t server)
{
	char path[64], children[1 << 16], *last;

	snprintf(path, sizeof path, "/proc/%d/task/%d/children", server, server);
	int file = open(path, O_RDONLY | O_CLOEXEC);
	if (file < 0)
		return 0;
	ssize_t size = read(file, children, sizeof children - 1);
	close(file);
	while (size > 0 && children[size - 1] == ' ')
		size--;
	children[size > 0 ? size : 0] = 0;
	last = strrchr(children, ' ');
	return (pid_t)strtol(last ? last : children, NULL, 10);
}

/* Return whether a process runs, or waits for a CPU or a disk: what has nothing to do, or hangs, does not. */
static bool is_at_work(pid_t pid)
{
	char path[64], status[512], *state;

	snprintf(path, sizeof path, "/proc/%d/stat", pid);
	int file = open(path, O_RDONLY | O_CLOEXEC);
	if (file < 0)
		return false;
	ssize_t size = read(file, status, sizeof status - 1);
	close(file);
	status[size > 0 ? size : 0] = 0;
	state = strrchr(status, ')'); /* of its name, which may have such itself */
	return state && state[1] && strchr("RD", state[2]);
}

/* End a process and wait until it is gone, with all that it has locked or listened at. */
static void end(pid_t pid)
{
	int process = (int)syscall(SYS_pidfd_open, pid, 0);

	if (process < 0)
		return;
	struct pollfd ended = {.fd = process, .events = POLLIN};
	if (!syscall(SYS_pidfd_send_signal, process, SIGKILL, NULL, 0))
		while (poll(&ended, 1, -1) < 0 && errno == EINTR)
			;
	close(process);
}

/* Make sure that no other process continues this call; `pid` is 0 as long as it was not read. `newest` was the server's
 * newest child when it could have forked for us.
 *
 * Once the reading end is shut, the pid cannot be sent any more; if it has been, it is here. Its process lives: it has
 * the connection's other end open.
 */
static void stop(const struct call *call, int connection, pid_t pid, pid_t server, pid_t newest)
{
	static char answer[LARGEST_ANSWER];

	shutdown(connection, SHUT_RD);
	if (!pid)
		pid = pid_in(answer, recv(connection, answer, sizeof answer, MSG_DONTWAIT));
	if (pid)
		end(pid);
	else if (call->action == START && newest_child(server) == newest && !is_at_work(server) && !is_at_work(newest))
		end(server);
}

static bool print(int descriptor, const char *text, size_t size)
{
	while (size) {
		ssize_t written = write(descriptor, text, size);
		if (written < 0 && errno != EINTR)
			return false;
		if (written > 0)
			text += written, size -= (size_t)written;
	}
	return true;
}

static enum outcome ask_over(struct call *call, int connection)
{
	static const int patience[][2] = PATIENCE;
	static char answer[LARGEST_ANSWER];
	const int *limits = patience[call->action];
	struct ucred server;
	socklen_t length = sizeof server;

	if (getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &server, &length))
		return refuse(call, NO_SERVER, "its pid cannot be known", errno);
	if (server.uid != geteuid())
		return refuse(call, NOT_DONE, "a stranger listens in the fork server's place", 0);
	pid_t newest = 0;
	ssize_t size = receive(connection, answer, limits[0] / 5);
	if (size < 0 && errno == ETIMEDOUT) {
		newest = newest_child(server.pid);
		size = receive(connection, answer, limits[0] - limits[0] / 5);
	}
	pid_t pid = pid_in(answer, size);
	if (pid) {
		size = send_call(connection, call) ? receive(connection, answer, limits[1]) : -1;
		if (size > 0 && (unsigned char)answer[0] == UNLIKE) {
			answer[size < LARGEST_ANSWER ? size : LARGEST_ANSWER - 1] = 0;
			return refuse(call, NOT_DONE, answer + 1, 0);
		}
		if (size > 0 && call->action == START && !answer[0] &&
		    send(connection, TAKEN, strlen(TAKEN), MSG_NOSIGNAL) < 0)
			size = -1;
	}
	if (size < 0 && errno == ETIMEDOUT) {
		stop(call, connection, pid, server.pid, newest);
		return refuse(call, NOT_DONE, "the fork server did not answer in time", 0);
	}
	if (!pid)
		return refuse(call, NO_SERVER, "the fork server ended", 0);
	if (size < 0)
		return refuse(call, NOT_DONE, "the fork server was lost", errno);
	if (!size)
		return refuse(call, NOT_DONE, "the process that the fork server has forked ended", 0);
	call->status = (unsigned char)answer[0];
	if (!print(call->status ? 2 : 1, answer + 1, (size_t)size - 1))
		call->status = 1;
	return DONE;
}

static enum outcome ask(struct call *call)
{
	struct sockaddr_un address = {0};
	enum outcome outcome;

	if (!server_address(&address))
		return refuse(call, NOT_DONE, "this program's installation cannot be found", 0);
	int connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (connection < 0)
		return refuse(call, NOT_DONE, "no socket", errno);
	if (connect(connection, (struct sockaddr *)&address, sizeof address))
		outcome = refuse(call, NO_SERVER, "no fork server", errno);
	else
		outcome = ask_over(call, connection);
	close(connection);
	return outcome;
}

/* -- what a daemon has left in the bundle: the whole answer to the `delete` that follows, see deleted.py ----------- */

static ssize_t read_file(const char *folder, const char *name, char *content)
{
	char path[2 * PATH_BYTES];

	snprintf(path, sizeof path, "%s/%s", folder, name);
	int file = open(path, O_RDONLY | O_CLOEXEC);
	if (file < 0)
		return -1;
	ssize_t size = read(file, content, LARGEST_FILE);
	close(file);
	return size;
}

/* Return whether there is a socket at that address on which no process listens, as a killed daemon leaves it. */
static bool is_dead(const char *path)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	struct stat status;

	if (stat(path, &status) && errno == ENOENT)
		return false;
	if ((size_t)snprintf(address.sun_path, sizeof address.sun_path, "%s", path) >= sizeof address.sun_path)
		return true;
	int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	/* EAGAIN: the queue of callers is full, so a process listens */
	bool dead = connect(probe, (struct sockaddr *)&address, sizeof address) && errno != EAGAIN;
	close(probe);
	return dead;
}

static bool give_left_answer(const struct call *call)
{
	static const char scheme[] = "unix://";
	char answer[LARGEST_FILE], address[LARGEST_FILE + 1];
	const char *bundle = NULL;

	for (int word = 0; word + 1 < call->count && !bundle; word++)
		if (!strcmp(call->words[word], "-bundle"))
			bundle = call->words[word + 1];
	if (!bundle)
		return false;
	ssize_t size = read_file(bundle, "deleted", answer), length = read_file(bundle, "address", address);
	if (size < 0 || length < 0)
		return false;
	address[length] = 0;
	bool plain = strncmp(address, scheme, strlen(scheme));
	return !is_dead(plain ? address : address + strlen(scheme)) && print(1, answer, (size_t)size);
}

/* -- the interpreter ---------------------------------------------------------------------------------------------- */

/* Let an interpreter leave a fork server behind, and wait until that listens, or cannot. It prints nothing: containerd
 * takes all that it reads for the daemon's address.
 */
static void leave_server(void)
{
	char *words[] = {interpreter, "-IS", "-c", leave_code, packages, NULL};
	posix_spawn_file_actions_t silence;
	pid_t child;

	if (posix_spawn_file_actions_init(&silence))
		return;
	if (!posix_spawn_file_actions_addopen(&silence, 1, "/dev/null", O_WRONLY, 0) &&
	    !posix_spawn_file_actions_adddup2(&silence, 1, 2) &&
	    !posix_spawn(&child, interpreter, &silence, NULL, words, environ))
		while (waitpid(child, NULL, 0) < 0 && errno == EINTR)
			;
	posix_spawn_file_actions_destroy(&silence);
}

static int become_interpreter(struct call *call)
{
	char *first[] = {interpreter, "-IS", "-c", run_code, packages, call->why};
	size_t count = sizeof first / sizeof *first;
	char **words = calloc(count + (size_t)call->count + 1, sizeof *words);

	if (words) {
		memcpy(words, first, sizeof first);
		memcpy(words + count, call->words, (size_t)call->count * sizeof *words);
		execv(interpreter, words);
	}
	fprintf(stderr, NAME ": cannot run %s: %s; `python -m kybernate_shim.launcher` writes this program again\n",
		interpreter, strerror(errno));
	return 1;
}

/* Actions come last; `-info` comes alone. What else Go's flags allow, the interpreter understands. */
static enum action action_of(int count, char **words)
{
	if (!count)
		return OTHER;
	const char *last = words[count - 1];
	if (!strcmp(last, "start"))
		return START;
	if (!strcmp(last, "delete"))
		return DELETE;
	return count == 1 && !strcmp(last, "-info") ? INFO : OTHER;
}

int main(int argc, char **argv)
{
	struct call call = {.count = argc > 0 ? argc - 1 : 0, .words = argv + 1};

	call.action = action_of(call.count, call.words);
	if (call.action == DELETE && give_left_answer(&call))
		return 0;
	if (call.action != OTHER) {
		enum outcome outcome = ask(&call);
		if (outcome == NO_SERVER && call.action == START) { /* the others are done sooner without */
			leave_server();
			outcome = ask(&call);
		}
		if (outcome == DONE)
			return call.status;
	}
	return become_interpreter(&call);
}
