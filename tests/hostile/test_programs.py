"""Programs of a tenant's that stand in the way of a checkpoint: it ends with an image that restores, or with a reason.

Each row is a program that does something odd, in processes of its own or before it counts. In every case the operation
ends by its deadline, a refusal leaves the container running and no image, an image restores, and the checkpoint of
another tenant's container, at the same time, succeeds.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from kybernate_shim.checkpoint.image.verification import verify
from kybernate_shim.linux.cgroup.hierarchies import directories
from kybernate_shim.ttrpc import RpcError
from tests import users
from tests.system import named
from tests.system.checkpoints import (
    PYTHON,
    Witness,
    assert_no_image,
    assert_whole,
    counting,
    holding,
    kybernate,
    refused,
    restored,
)
from tests.system.ctr import Ctr, eventually, finished

DEADLINE = 60  # seconds of a checkpoint, and of what a tenant can make of it
MEMORY_LIMIT = 128 << 20

PRELUDE = """
import ctypes, fcntl, mmap, os, resource, select, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def child(work):
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(told)
        work(lambda: os.write(tell, b"x"))
        os._exit(0)
    os.close(tell)
    assert os.read(told, 1) == b"x"
    os.close(told)
    return pid
def sleeping(ready):
    ready()
    time.sleep(100000)
def directory(name):
    os.makedirs(name, exist_ok=True); os.chdir(name)
"""
# It has to be able to write its numbers without a descriptor or a process of its own.
COUNTING = """
number = 0
while True:
    number += 1
    os.write(1, b"%d\\n" % number)
    time.sleep(0.05)
"""


USERFAULTFD = """
fd = libc.syscall(323, os.O_CLOEXEC | 1)
assert fd >= 0, ctypes.get_errno()
fcntl.ioctl(fd, 0xC018AA3F, bytearray(struct.pack("QQQ", 0xAA, 0, 0)))
memory = mmap.mmap(-1, 1 << 20)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
fcntl.ioctl(fd, 0xC020AA00, bytearray(struct.pack("QQQQ", address, 1 << 20, 1, 0)))
"""


@dataclass(frozen=True)
class Row:
    """`refusal` is a pattern of what the refusal says, "" where the checkpoint must succeed; `may` allows both.

    `needs` are capabilities, without which it is no attack; `flags` are further ones of `ctr`.
    """

    name: str
    program: str
    refusal: str = ""
    may: bool = False
    needs: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    pids: int = 0  # processes that its cgroup may have
    again: tuple[str, ...] = ()  # flags of the restored container, if others


ROWS = (
    Row(
        "names that are no UTF-8, end lines or act on terminals",
        """
directory(b"/tmp/odd \\xff\\n\\x1b[2J")
held = []
for name in (b"\\xff\\xfe", b"one\\ntwo", b"\\x1b]0;title\\x07", b"\\xc2\\x85", b"a" * 255, b"$(reboot)"):
    open(name, "wb").write(b"x"); held.append(open(name, "rb"))
    os.mkdir(name + b"d" if len(name) < 255 else b"d" * 255)
    one = socket.socket(socket.AF_UNIX); one.bind(b"s" + name[:90]); one.listen(); held.append(one)
    two = socket.socket(socket.AF_UNIX); two.bind(b"\\0" + name[:90]); two.listen(); held.append(two)
os.symlink(b"/nowhere\\n\\xff", b"link\\n")
""",
    ),
    Row(
        "a socket whose name ends like one of the kernel's marks",
        """
directory("/tmp/marks")
one = socket.socket(socket.AF_UNIX); one.bind("socket (deleted)"); one.listen()
""",
        refusal=".",
        may=True,
    ),
    Row(
        "a removed file whose name ends like one of the kernel's marks",
        """
directory("/tmp/marks")
one = open("file (deleted)", "w+"); one.write("x"); one.flush()
two = open("gone (deleted)", "w+"); os.unlink("gone (deleted)")
""",
    ),
    Row(
        "a directory of many entries",
        """
directory("/tmp/many")
for n in range(100000): os.symlink("x", str(n))
""",
        "did not end within",  # where a machine is busy with other work
        may=True,
    ),
    Row(
        "a directory of many directories",
        """
directory("/tmp/many")
for n in range(100000): os.mkdir(str(n))
""",
        "did not end within",  # where a machine is busy with other work
        may=True,
    ),
    Row(
        "directories within each other, 2000 levels",
        """
directory("/tmp/deep")
for n in range(2000):
    os.mkdir("d"); os.chdir("d")
os.chdir("/")
""",
    ),
    Row(
        "a path that is longer than a call takes",
        """
directory("/tmp/long")
for n in range(30):
    os.mkdir("d" * 200); os.chdir("d" * 200)
os.chdir("/")
""",
        "a path of more than 4096 bytes",
    ),
    Row(
        "a working directory that is deeper than a path",
        """
directory("/tmp/long")
for n in range(30):
    os.mkdir("d" * 200); os.chdir("d" * 200)
""",
        "has as its working directory a file whose path has more than 4095 bytes",
    ),
    Row(
        "an open file that is deeper than a path",
        """
directory("/tmp/long")
for n in range(30):
    os.mkdir("d" * 200); os.chdir("d" * 200)
held = open("file", "w"); one = socket.socket(socket.AF_UNIX); one.bind("socket"); one.listen(); os.chdir("/")
""",
        "a file whose path has more than 4095 bytes",
    ),
    Row(
        "sparse files of terabytes",
        """
directory("/tmp/sparse")
for n in range(8):
    file = os.open(str(n), os.O_RDWR | os.O_CREAT, 0o600)
    os.pwrite(file, b"begin", 0); os.pwrite(file, b"end", (4 << 40) + n)
""",
    ),
    Row(
        "a sparse file with more stretches than a map holds",
        """
directory("/tmp/sparse")
file = os.open("holes", os.O_RDWR | os.O_CREAT, 0o600)
for n in range(80000): os.pwrite(file, b"x", n << 13)
""",
    ),
    Row(
        "many names of one file",
        """
directory("/tmp/names")
file = open("0", "w+"); file.write("x"); file.flush()
for n in range(1, 30000): os.link("0", str(n))
os.unlink("0")
""",
    ),
    Row(
        "directories within each other, more than a path can name",
        """
directory("/tmp/deeper")
for n in range(10000):
    os.mkdir("d" * 9); os.chdir("d" * 9)
os.chdir("/")
""",
        "a path of more than 4096 bytes",
    ),
    Row(
        "files in memory as large as a number can say",
        """
directory("/dev/shm/sparse")
for n in range(3):
    file = os.open(str(n), os.O_RDWR | os.O_CREAT, 0o600); os.pwrite(file, b"begin", 0)
    os.pwrite(file, b"end", (1 << 63) - 4096 * (n + 1)); os.close(file)
held = os.open("0", os.O_RDWR)
""",
        refusal=".",
        may=True,
    ),
    Row(
        "forks without end",
        """
def forking(ready):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    ready()
    while True:
        if os.fork() == 0:
            if os.fork() == 0: os._exit(0)
            os._exit(0)
for n in range(4): child(forking)
""",
    ),
    Row(
        "a chain of processes, each of which ends when it has made the next",
        """
def fleeing(ready):
    ready()
    while os.fork(): os._exit(0)
    while True:
        if os.fork(): os._exit(0)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for n in range(2): child(fleeing)
""",
    ),
    Row(
        "threads without end",
        """
import threading
def threading_(ready):
    ready()
    while True:
        one = threading.Thread(target=lambda: None); one.start(); one.join()
child(threading_)
""",
    ),
    Row(
        "programs executed without end",
        """
def executing(ready):
    ready()
    again = 'exec sh -c "$0" "$0"'
    os.execv("/bin/sh", ["sh", "-c", again, again])
for n in range(4): child(executing)
""",
    ),
    Row(
        "programs that are spawned without end",
        """
def spawning(ready):
    import subprocess
    ready()
    while True: subprocess.run(["/bin/true"])
for n in range(2): child(spawning)
""",
    ),
    Row(
        "a process that has stopped itself",
        """
one = child(sleeping); os.kill(one, signal.SIGSTOP)
def itself(ready): ready(); os.kill(os.getpid(), signal.SIGSTOP)
child(itself)
""",
        "has been stopped by a signal",
        may=True,  # on cgroup v2
    ),
    Row(
        "processes that stop and continue each other without end",
        """
one = child(sleeping)
def stopping(ready):
    ready()
    while True: os.kill(one, signal.SIGSTOP); os.kill(one, signal.SIGCONT)
child(stopping)
""",
        "has been stopped by a signal",
        may=True,
    ),
    Row(
        "a process that traces another one",
        """
one = child(sleeping)
def tracing(ready):
    assert libc.ptrace(16, one, None, None) == 0
    os.waitpid(one, 0x40000000); libc.ptrace(7, one, None, None)
    sleeping(ready)
libc.prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)
def tracer_of_its_own(ready):
    mine = os.fork()
    if mine == 0:
        libc.ptrace(0, 0, None, None); os.kill(os.getpid(), signal.SIGSTOP); time.sleep(100000)
    os.waitpid(mine, 0); libc.ptrace(7, mine, None, None)
    sleeping(ready)
child(tracer_of_its_own)
""",
        "is traced by",
    ),
    Row(
        "tracers that seize and let go without end",
        """
def tracer(ready):
    mine = os.fork()
    if mine == 0: time.sleep(100000)
    libc.ptrace(0x4206, mine, None, None); ready()
    while True:
        libc.ptrace(0x4206, mine, None, None); libc.ptrace(0x4207, mine, None, None); os.waitpid(mine, 0x40000001)
        libc.ptrace(17, mine, None, None)
child(tracer)
""",
        "is traced by",
        may=True,
    ),
    Row(
        "a tracer that never lets go for more than an instant",
        """
def tracer(ready):
    mine = os.fork()
    if mine == 0:
        while True: pass
    libc.ptrace(0x4206, mine, None, None); ready()
    while True:
        libc.ptrace(0x4207, mine, None, None); os.waitpid(mine, 0x40000001); libc.ptrace(17, mine, None, None)
        libc.ptrace(0x4206, mine, None, None)
for n in range(4): child(tracer)
""",
        "is traced by",
        may=True,
    ),
    Row(
        "memory that a userfaultfd of its own serves, and does not",
        USERFAULTFD,
        "a userfaultfd",
    ),
    Row(
        "memory that a userfaultfd serves whose descriptor only a child has, and a thread that waits for it",
        USERFAULTFD
        + """
child(sleeping); os.close(fd)
import threading
threading.Thread(target=lambda: libc.memset(ctypes.c_void_p(address), 0, 10), daemon=True).start()
time.sleep(0.2)
""",
        "a userfaultfd",
    ),
    Row(
        "no descriptor left",
        """
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
try:
    while True: os.dup(0)
except OSError: pass
""",
        "has 0 descriptors left of its 200",
    ),
    Row(
        "eight descriptors left",
        """
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
try:
    while True: last = os.dup(0)
except OSError: os.closerange(last - 7, last + 1)
""",
    ),
    Row(
        "many descriptors in many processes",
        """
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
held = [os.open("/dev/null", os.O_RDONLY) for n in range(900)]
for n in range(20): child(sleeping)
""",
    ),
    Row(
        "no process left",
        """
children = []
try:
    while True: children.append(child(sleeping)); time.sleep(0.02)
except OSError: pass
""",
        pids=100,
    ),
    Row(
        "no memory left",
        f"""
memory = []
def growing(ready):
    ready()
    while True: memory.append(os.urandom(1 << 20))
for n in range(1000):
    if int(open("/proc/self/statm").read().split()[1]) * 4096 > {MEMORY_LIMIT} * 3 // 4: break
    memory.append(os.urandom(1 << 20))
def repeatedly(ready):
    ready()
    while True:
        mine = os.fork()
        if mine == 0:
            open("/proc/self/oom_score_adj", "w").write("1000")
            while True: memory.append(os.urandom(1 << 20))
        os.waitpid(mine, 0)
child(repeatedly)
""",
        flags=("--memory-limit", str(MEMORY_LIMIT)),
        may=True,
        refusal=".",
        again=("--memory-limit", str(4 * MEMORY_LIMIT)),
    ),
    Row(
        "sockets with messages under way, and descriptors within them",
        """
one, two = socket.socketpair()
three, four = socket.socketpair()
for n in range(50): socket.send_fds(one, [b"x"], [three.fileno(), four.fileno(), one.fileno(), two.fileno()])
""",
        may=True,
        refusal=".",
    ),
    Row(
        "a file that grows without end, by a process that outruns its reader",
        """
directory("/tmp/grown")
def growing(ready):
    file = os.open("file", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    ready()
    while True:
        os.write(file, bytes(1 << 16))
        if os.fstat(file).st_size > 64 << 20: os.ftruncate(file, 0)
child(growing)
""",
    ),
    Row(
        "files that are renamed, removed and made again without end",
        """
directory("/tmp/moved")
def moving(ready):
    os.makedirs("a/b/c"); ready()
    number = 0
    while True:
        number += 1
        held = open("a/b/c/file", "w"); os.rename("a/b", "b"); os.rename("b/c/file", "file")
        os.link("file", "other"); os.unlink("file"); os.rename("b", "a/b")
        if number % 3: os.unlink("other")
        else: os.rename("other", "a/b/other")
child(moving)
""",
        refusal=".",
        may=True,
    ),
    Row(
        "files that cannot be changed",
        """
directory("/tmp/flags")
for name, flag in (("immutable", 0x10), ("append", 0x20)):
    file = os.open(name, os.O_RDWR | os.O_CREAT, 0o600); os.write(file, b"x")
    fcntl.ioctl(file, 0x40086602, struct.pack("l", flag)); os.close(file)
    held = os.open(name, os.O_RDONLY)
os.mkdir("directory"); inner = os.open("directory", os.O_RDONLY); fcntl.ioctl(inner, 0x40086602, struct.pack("l", 0x10))
""",
        needs=("CAP_LINUX_IMMUTABLE",),
    ),
    Row(
        "a mount namespace of a child's",
        """
def apart(ready):
    assert libc.unshare(0x20000) == 0, ctypes.get_errno()
    assert libc.mount(None, b"/", None, 0x44000, None) == 0
    os.makedirs("/tmp/mounted", exist_ok=True)
    assert libc.mount(b"x", b"/tmp/mounted", b"tmpfs", 0, None) == 0
    open("/tmp/mounted/file", "w").write("x"); held = open("/tmp/mounted/file")
    os.chdir("/tmp/mounted")
    sleeping(ready)
child(apart)
""",
        refusal=".",
        may=True,
        needs=("CAP_SYS_ADMIN",),
    ),
    Row(
        "mounts over each other, and over what is open",
        """
directory("/tmp/covered")
open("file", "w").write("below"); below = open("file")
for n in range(5): assert libc.mount(b"x", b"/tmp/covered", b"tmpfs", 0, None) == 0
open("/tmp/covered/file", "w").write("above"); above = open("/tmp/covered/file")
""",
        refusal=".",
        may=True,
        needs=("CAP_SYS_ADMIN",),
    ),
    Row(
        "device nodes of the node's disks",
        """
directory("/tmp/devices")
for n in range(16):
    for kind, major in ((0o60600, 254), (0o20600, 1)):
        try: os.mknod("%o-%d" % (kind, n), kind, os.makedev(major, n))
        except PermissionError: pass  # in a user namespace
os.mkfifo("fifo")
""",
        refusal=".",
        may=True,
        needs=("CAP_MKNOD",),
    ),
    Row(
        "locks and leases on what is read",
        """
directory("/tmp/locked")
held = []
for n in range(20):
    file = os.open(str(n), os.O_RDWR | os.O_CREAT, 0o600); os.write(file, b"x"); os.close(file)
    file = os.open(str(n), os.O_RDONLY); held.append(file)
    if n % 2: fcntl.flock(file, fcntl.LOCK_EX)
    else: fcntl.fcntl(file, 1024, fcntl.F_WRLCK)
""",
        refusal="lease|lock",
        may=True,
    ),
    Row(
        "attributes as many as a file holds",
        """
directory("/tmp/attributes")
for n in range(40):
    open(str(n), "w").write("x")
    try:
        for m in range(200): os.setxattr(str(n), "user.a=b\\n%d" % m if n % 2 else "user.x%d" % m, b"v" * 60)
    except OSError: pass
""",
        refusal="has a name that a tar file cannot hold",
        may=True,
    ),
    Row(
        "a filter that kills the process that makes a call",
        """
def filtered(ready):
    ready(); time.sleep(0.1)
    libc.prctl(38, 1, 0, 0, 0); libc.prctl(22, 1, 0, 0, 0)
    while True: pass
child(filtered)
""",
    ),
    Row(
        "a process that holds a vfork",
        """
os.mkfifo("/tmp/fifo")
def held(ready):
    ready()
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 9, "/tmp/fifo", os.O_RDONLY, 0)])
child(held)
""",
        "have shared their memory",
    ),
)


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "image"
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture(scope="module")
def neighbour() -> Iterator[Witness]:
    """Another tenant's container, which has nothing to do with any of this."""
    with counting(Ctr(), "python3", "-c", f"import os, time\n{COUNTING}", image=PYTHON) as one:
        yield one


def flags_of(row: Row, user: int, *, again: bool = False) -> list[str]:
    """Return ctr's flags for a program of root's or of a user's, or for its restore."""
    others = row.again if again and row.again else row.flags
    flags = [*(word for name in row.needs for word in ("--cap-add", name)), *others]
    return [*flags, *(users.flags(flags) if user else [])]


@contextmanager
def attacking(ctr: Ctr, row: Row, flags: Sequence[str]) -> Iterator[Witness]:
    """Run the program, which counts when it is ready."""
    log = Path(f"/tmp/{ctr.new_id('log')}")
    own = Ctr(ctr.runtime, ctr.namespace, PYTHON)
    argv = ["python3", "-c", PRELUDE + row.program + COUNTING]
    try:
        with own.running(*argv, flags=["--log-uri", f"file://{log}", *flags]) as id:
            if row.pids:
                (directories(ctr.pid(id))["pids"] / "pids.max").write_text(str(row.pids))
            witness = Witness(id, log)
            eventually(lambda: witness.count() > 2, seconds=60)
            yield witness
    finally:
        log.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("row", "user"),
    [
        pytest.param(row, user, id=f"{row.name}, by {who}")
        for row in ROWS
        for user, who in ((0, "root"), (users.UID, "a user"))
        if not (user and row.needs)
    ],
)
def test_checkpoint_ends_with_an_image_that_restores_or_with_a_reason(
    ours: Ctr, image: Path, neighbour: Witness, row: Row, user: int
) -> None:
    flags = flags_of(row, user)
    other, log = image.parent / "other", image.parent / "log"
    with attacking(ours, row, flags) as one, ThreadPoolExecutor(1) as pool:
        beside = pool.submit(kybernate, "checkpoint", neighbour.id, str(other))
        argv = ["kybernate", "checkpoint", one.id, str(image), "--exit", "--timeout", str(DEADLINE)]
        done = finished(argv, timeout=2 * DEADLINE)
        beside.result()
        said = done.stderr.decode(errors="replace")
        assert "Traceback" not in said
        if done.returncode == 0:
            assert not row.refusal or row.may, "it was not refused"
            assert_whole(image)
        else:
            print(row.name, "refused:", said)
            assert row.refusal, said
            assert re.search(row.refusal, said), said
            assert_no_image(image)
            assert ours.status(one.id) == "RUNNING"
            one.assert_goes_on()
    if done.returncode == 0:
        again_in = flags_of(row, user, again=True)
        with restored(ours, image, log=log, flags=again_in, container_image=PYTHON) as again:
            again.assert_goes_on()
    assert not verify(other)
    neighbour.assert_goes_on()


@pytest.mark.parametrize("row", [row for row in ROWS if row.may or not row.refusal], ids=lambda row: row.name)
def test_hold_that_is_released_and_checkpoint_that_is_cancelled_leave_the_program_running(
    ours: Ctr, image: Path, row: Row
) -> None:
    with attacking(ours, row, flags_of(row, 0)) as one:
        argv = ["kybernate", "checkpoint", one.id, str(image), "--timeout", str(DEADLINE)]
        held = finished([*argv, "--hold"], timeout=2 * DEADLINE)
        if held.returncode == 0:
            kybernate("release", one.id)
        else:
            assert row.refusal, held.stderr
            assert re.search(row.refusal, held.stderr.decode(errors="replace")), held.stderr
        one.assert_goes_on()
        second = image.parent / "second"
        with named.save_begun(ours, one.id, "one", second) as checkpoint:
            eventually(lambda: second.exists() or checkpoint.done(), pause=0.002)
            with suppress(RpcError):  # it has ended by now
                named.cancel(ours, one.id, "one")
        if named.status(ours, one.id).last.outcome == "succeeded":
            assert_whole(second)
        else:
            assert_no_image(second)
        one.assert_goes_on()


def test_memory_that_does_not_suffice_for_a_restore_is_said_in_words(ours: Ctr, image: Path) -> None:
    with holding(ours, 100) as one:
        kybernate("checkpoint", one.id, str(image))
    flags = ["--annotation", f"kybernate.io/restore-from={image}", "--memory-limit", str(40 << 20), "-d"]
    id = ours.new_id("r")
    try:
        said = refused(*Ctr(image=PYTHON).run_argv(id, "false", flags=flags))
        assert "where a memory limit does not suffice" in said
        assert "nothing is left of it" in said
    finally:
        ours.remove(id)
