"""A program whose processes each change one thing of themselves, and say what they are, on request.

It is the source of a program for a container, `PROGRAM`, and the list of what its processes do, `ROWS`.
"""

from __future__ import annotations

# Each row is a function of PROGRAM of that name, with "_" for each blank. Those of ANYBODY need no privilege.
ANYBODY = (
    "as started", "umask", "limits", "nice", "batch", "idle", "reset on fork", "io priority", "io idle", "cpu",
    "timer slack", "core filter", "out of memory", "filter", "two filters", "filter of a thread", "undumpable",
    "no new privileges", "process settings", "signals", "session", "threads",
)  # fmt: skip
PRIVILEGED = (
    "user", "saved ids", "filesystem ids", "groups", "ambient", "bounding", "inheritable", "no capabilities",
    "securebits", "keep capabilities", "setuid program", "ids of a thread", "capabilities of a thread",
    "limits of a user", "undumpable user", "root again",
)  # fmt: skip
ROWS = ANYBODY + PRIVILEGED

PROGRAM = r'''
import ctypes, json, os, queue, resource, shutil, signal, struct, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
ARM = os.uname().machine == "aarch64"
SYSCALL = {
    "ioprio_set": (251, 30), "ioprio_get": (252, 31), "ptrace": (101, 117), "acct": (163, 89),
    "setresuid": (117, 147), "setresgid": (119, 149), "capset": (126, 91), "capget": (125, 90),
}
SETPCAP, NET_RAW, SYS_CHROOT, CHOWN, BIND = 8, 13, 18, 0, 10
FROM_STATUS = (
    "Name Umask Uid Gid Groups SigQ SigBlk SigIgn SigCgt SigPnd ShdPnd CapInh CapPrm CapEff CapBnd CapAmb NoNewPrivs"
    " Seccomp Seccomp_filters THP_enabled Cpus_allowed_list"
).split()


def call(name, *arguments):
    result = libc.syscall(SYSCALL[name][ARM], *arguments)
    if result == -1:
        raise OSError(ctypes.get_errno(), name)
    return result


def prctl(*arguments):
    result = libc.prctl(*arguments, *[0] * (5 - len(arguments)))
    if result == -1:
        raise OSError(ctypes.get_errno(), f"prctl {arguments}")
    return result


# -- what a process is ------------------------------------------------------------------------------------------------


class Thread:
    """A thread that does something once, and says on request what it is."""

    def __init__(self, begin):
        self.asked, self.answers = queue.Queue(), queue.Queue()
        threading.Thread(target=self.work, args=(begin,), daemon=True).start()
        self.ask()

    def work(self, begin):
        begin()
        while True:
            self.asked.get()
            self.answers.put(of_thread())

    def ask(self):
        self.asked.put(None)
        return self.answers.get(timeout=20)


def of_thread():
    me = threading.get_native_id()
    status = open(f"/proc/self/task/{me}/status", errors="replace").read().splitlines()
    found = dict(line.split(":\t", 1) for line in status if ":\t" in line)
    return {
        **{name: found.get(name, "") for name in FROM_STATUS if name != "SigQ"},
        "cpus": sorted(os.sched_getaffinity(0)), "slack": prctl(30), "io": call("ioprio_get", 1, 0),
        "policy": os.sched_getscheduler(0), "priority": os.sched_getparam(0).sched_priority,
        "nice": os.getpriority(os.PRIO_PROCESS, me), "securebits": prctl(27), "keepcaps": prctl(7),
        "refused": [name for name in ("ptrace", "acct") if refused(name)],
    }


def refused(name):
    """Whether a filter of our own refuses the call, with an error that no kernel has for it."""
    return libc.syscall(SYSCALL[name][ARM], -1, -1, -1, -1) == -1 and ctypes.get_errno() == 77


def number(option):
    value = ctypes.c_int()
    prctl(option, ctypes.byref(value))
    return value.value


def can_write(directory):
    path = f"{directory}/probe-{os.getpid()}"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    except OSError as error:
        return error.errno
    os.unlink(path)
    return 0


def mounted():
    rows = [line.split() for line in open("/proc/self/mountinfo")]
    return {row[4]: row[5].split(",")[0] for row in rows if row[4] in ("/", "/volatile")}


def state():
    return {
        "main": of_thread(), "threads": [one.ask() for one in THREADS],
        "limits": [resource.getrlimit(kind) for kind in range(16)],
        "oom": open("/proc/self/oom_score_adj").read(), "core": open("/proc/self/coredump_filter").read(),
        "dumpable": prctl(3), "parent death": number(2), "subreaper": number(37), "thp": prctl(42),
        "session": os.getsid(0), "group": os.getpgid(0), "directory": os.getcwd(), "pid": os.getpid(),
        "writes": {place: can_write(place) for place in ("/", "/tmp", "/volatile")}, "mounts": mounted(),
    }


# -- what a process does to itself --------------------------------------------------------------------------------

THREADS = []


def capabilities():
    header, data = struct.pack("Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    call("capget", header, data)
    effective, permitted, inheritable = struct.unpack("III", data.raw[:12])
    return effective, permitted, inheritable


def set_capabilities(effective, permitted, inheritable):
    header, data = struct.pack("Ii", 0x20080522, 0), struct.pack("IIIIII", effective, permitted, inheritable, 0, 0, 0)
    call("capset", header, data)


def become_user():
    os.setgroups([7, 8]); os.setresgid(1000, 1000, 1000); os.setresuid(1000, 1000, 1000)


def install_filter(name):
    prctl(38, 1)
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, SYSCALL[name][ARM]), (6, 0, 0, 0x50000 | 77), (6, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in code))
    line = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(program)))
    prctl(22, 2, ctypes.c_void_p(ctypes.addressof(line)))


def as_started(): pass
def umask(): os.umask(0o027)
def nice(): os.setpriority(os.PRIO_PROCESS, 0, 7)  # whatever the tests themselves run with
def batch(): os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
def idle(): os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
def reset_on_fork(): os.sched_setscheduler(0, os.SCHED_BATCH | os.SCHED_RESET_ON_FORK, os.sched_param(0))
def io_priority(): call("ioprio_set", 1, 0, 2 << 13 | 6)
def io_idle(): call("ioprio_set", 1, 0, 3 << 13)
def cpu(): os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
def timer_slack(): prctl(29, 777777)
def core_filter(): open("/proc/self/coredump_filter", "w").write("0x7")
def out_of_memory(): open("/proc/self/oom_score_adj", "w").write("777")
def filter(): install_filter("ptrace")
def two_filters(): install_filter("ptrace"); install_filter("acct")
def filter_of_a_thread(): prctl(38, 1); THREADS.append(Thread(lambda: install_filter("acct")))
def undumpable(): prctl(4, 0)
def no_new_privileges(): prctl(38, 1)
def process_settings(): prctl(1, signal.SIGTERM); prctl(36, 1); prctl(41, 1)
def session(): os.setsid(); os.chdir("/usr/lib")


def limits():
    """Give each kind limits of its own, hard and soft, in which this process can live."""
    for kind in range(16):
        soft, hard = resource.getrlimit(kind)
        hard = hard if hard != resource.RLIM_INFINITY else (1 << 40) + kind
        if kind != resource.RLIMIT_NPROC and hard > 64:
            hard -= 4096 if hard > 1 << 20 else 1
        soft = hard if soft == resource.RLIM_INFINITY or soft > hard else soft
        resource.setrlimit(kind, (soft - (soft > 64), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 4096))


def signals():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2, signal.SIGRTMIN + 3])
    os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGRTMIN + 3)


def threads():
    def one(place):
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[place % len(cpus)]})
        prctl(15, b"thread %d" % place)
        prctl(29, 100000 + place)
        call("ioprio_set", 1, 0, 2 << 13 | place)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10 + place)
    for place in range(3):
        THREADS.append(Thread(lambda place=place: one(place)))


def user(): become_user()
def saved_ids(): os.setresgid(1003, 1004, 1005); os.setresuid(1000, 1001, 1002)
def filesystem_ids(): libc.setfsgid(1009); libc.setfsuid(1008)
def groups(): os.setgroups(range(2000, 2300))
def bounding(): prctl(24, NET_RAW); prctl(24, SYS_CHROOT)
def no_capabilities(): set_capabilities(0, 0, 0)
def securebits(): prctl(28, 0x0F)
def keep_capabilities(): prctl(8, 1)
def limits_of_a_user(): limits(); become_user()
def undumpable_user(): become_user(); prctl(4, 0)
def root_again(): os.setresuid(1000, 0, 0); os.setresgid(1000, 0, 0)


def ambient():
    effective, permitted, _ = capabilities()
    set_capabilities(effective, permitted, 1 << BIND)
    prctl(47, 2, BIND, 0, 0)


def inheritable():
    effective, permitted, _ = capabilities()
    set_capabilities(effective & ~(1 << CHOWN), permitted, 1 << CHOWN | 1 << BIND)


def ids_of_a_thread():
    THREADS.append(Thread(lambda: (call("setresgid", 1235, 1235, 0), call("setresuid", 1234, 1234, 0))))


def capabilities_of_a_thread():
    THREADS.append(Thread(lambda: (prctl(24, NET_RAW), set_capabilities(1 << CHOWN, 1 << CHOWN | 1 << BIND, 0))))


def setuid_program():
    shutil.copy(sys.executable, "/tmp/setuid-python")
    os.chmod("/tmp/setuid-python", 0o4755)
    become_user()
    for fd in (ASKED, ANSWER):
        os.set_inheritable(fd, True)
    source = open("/proc/self/cmdline").read().split("\0")[2]
    os.execv("/tmp/setuid-python", ["setuid-python", "-c", source, "serve", str(ASKED), str(ANSWER)])


# -- asking them --------------------------------------------------------------------------------------------------


def serve():
    while True:
        os.write(ANSWER, json.dumps(state()).encode() + b"\n")
        if not os.read(ASKED, 1):
            os._exit(0)


def begin(name):
    global ASKED, ANSWER
    ASKED, ask = os.pipe()
    answer, ANSWER = os.pipe()
    if os.fork() == 0:
        os.close(ask), os.close(answer)
        try:
            globals()[name.replace(" ", "_")]()
            serve()
        except BaseException as error:
            os.write(ANSWER, json.dumps({"failed": repr(error)}).encode() + b"\n")
        os._exit(1)
    os.close(ASKED), os.close(ANSWER)
    return ask, os.fdopen(answer)


if sys.argv[1] == "serve":
    ASKED, ANSWER = int(sys.argv[2]), int(sys.argv[3])
    serve()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
children = {name: begin(name) for name in sys.argv[1].split(",")}
while True:
    for name, (ask, answer) in children.items():
        print("STATE", json.dumps([name, json.loads(answer.readline())]), flush=True)
    print("END", flush=True)
    signal.sigwait([signal.SIGUSR1])
    for ask, _ in children.values():
        os.write(ask, b"?")
'''
