"""Kinds of things that programs hold: what no restore brings back is refused before a freeze, the rest comes back."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.system.checkpoints import PYTHON, assert_no_image, dumps_sockets, kybernate, refused
from tests.system.cri import Cri
from tests.system.ctr import Ctr, eventually
from tests.system.tenants import ROOT
from tests.system.test_restorable import PRELUDE, after_restore, running

# `at` gives a descriptor a number that is free in each lane; `child` forks.
CHILD = """
def at(number, fd):
    os.dup2(fd, number); os.close(fd)
    return number
def child(work):
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(tell, b"f" if work() else b"x")
        time.sleep(10000)
    assert os.read(told, 1) == b"x"
    return pid
"""
# What any program can hold, and what one with capabilities can; each with the words of its refusal.
ANYBODY = (
    CHILD
    + """
queue = at(14, libc.mq_open(b"/q", os.O_CREAT | os.O_RDWR, 0o600, None))
at(15, socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262).detach())
os.mkfifo("/tmp/fifo"); fifo = at(16, os.open("/tmp/fifo", os.O_PATH))
bound = socket.socket(socket.AF_UNIX); bound.bind("/tmp/socket"); path = at(18, os.open("/tmp/socket", os.O_PATH))
ready()
found(there=all(os.path.exists(f"/proc/self/fd/{one}") for one in (queue, fifo, path)))
"""
)
WORDS_OF_ANYBODY = (
    "has 1 POSIX message queues at /dev/mqueue ('q'), which CRIU cannot dump: remove them (mq_unlink(3))",
    "has '/q' open as its descriptor 14, which lies on no mount that the container sees, such as a POSIX message queue",
    "has as its descriptor 15 a socket of MPTCP, which CRIU cannot dump: programs in Go",
    "has '/tmp/fifo' open as its descriptor 16, the FIFO by O_PATH, which CRIU cannot dump",
    "has '/tmp/socket' open as its descriptor 18, the socket by O_PATH, which CRIU cannot dump",
)
PRIVILEGED = (
    CHILD
    + """
import fcntl
traced = child(lambda: 0)
assert libc.ptrace(0x4206, traced, None, None) == 0
deadline = struct.pack("IIQiIQQQ", 48, 6, 0, 0, 0, 1000000, 10000000, 10000000)
scheduled = child(lambda: libc.syscall(314, 0, deadline, 0))
tunnel = at(18, os.open("/dev/net/tun", os.O_RDWR)); fcntl.ioctl(tunnel, 0x400454CA, struct.pack("16sH22x", b"tun7", 1))
unread = socket.socket(16, 3, 0); unread.bind((0, 0)); unread.send(struct.pack("IHHII", 20, 18, 0x301, 1, 0) + bytes(4))
at(19, unread.detach())
ready()
found(alive=all(os.waitpid(pid, os.WNOHANG) == (0, 0) for pid in (traced, scheduled)))
"""
)
WORDS_OF_PRIVILEGED = (
    " is traced by python3[",
    " has the scheduling policy SCHED_DEADLINE, which CRIU cannot restore: let it use another one",
    "open as its descriptor 18, of the network interface 'tun7', which no restore finds in the new container's network",
    "has as its descriptor 19 a netlink(7) socket with unread messages, which CRIU cannot dump",
)
NETWORK = (
    CHILD
    + """
one = child(lambda: libc.unshare(0x40000000))
ready()
found(alive=os.waitpid(one, os.WNOHANG) == (0, 0))
"""
)
WORDS_OF_NETWORK = ("has a network namespace of its own: CRIU dumps no",)
CAPABLE = pytest.mark.as_root("the program needs capabilities to have what is refused")


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "image"
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.mark.parametrize(
    ("program", "flags", "words"),
    [
        pytest.param(ANYBODY, (), WORDS_OF_ANYBODY, id="any program"),
        pytest.param(PRIVILEGED, ("--privileged",), WORDS_OF_PRIVILEGED, marks=CAPABLE, id="privileged"),
        pytest.param(NETWORK, ("--privileged",), WORDS_OF_NETWORK, marks=CAPABLE, id="network"),
    ],
)
def test_what_criu_cannot_dump_is_refused_while_the_container_runs(
    ours: Ctr, image: Path, program: str, flags: Sequence[str], words: Sequence[str]
) -> None:
    with running(ours, image, program, flags) as one:
        said = refused("kybernate", "checkpoint", one.id, str(image), "--exit")
        assert [text for text in words if text not in said] == [], said
        assert_no_image(image)
        assert "criu failed" not in said
        assert all(one.found().values())


BOUND = """
os.makedirs("/srv/a"); os.makedirs("/srv/b"); open("/srv/a/x", "w").write("kept")
assert libc.mount(b"/srv/a", b"/srv/b", None, 4096, None) == 0
ready()
open("/srv/b/y", "w").write("new")
found(kept=open("/srv/b/x").read(), same=open("/srv/a/y").read())
"""


@pytest.mark.as_root("the program mounts")
def test_mount_of_a_part_of_the_root_filesystem_comes_back(ours: Ctr, image: Path) -> None:
    """That a program in the container has made: it is no mount of the node's."""
    assert after_restore(ours, image, BOUND, flags=("--privileged",)) == {"kept": "kept", "same": "new"}


# A server of UDP that asks how packets came, one of both families, a listener, and a member of a group.
SOCKETS = """
four = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); four.bind(("127.0.0.1", 0))
six = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM); six.bind(("::", 0))
listener = socket.create_server(("127.0.0.1", 0))
member = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); member.bind(("0.0.0.0", 5353))
member.setsockopt(0, 35, socket.inet_aton("239.1.2.3") + socket.inet_aton("127.0.0.1"))
wanted = [(four, 0, 8, 1), (four, 0, 12, 1), (four, 0, 13, 1), (four, 0, 10, 2), (four, 0, 34, 0), (four, 1, 40, 1)]
wanted += [(four, 17, 104, 1), (four, 1, 37, 0x18), (six, 41, 49, 1), (six, 41, 66, 1), (six, 41, 16, 9)]
wanted += [(listener, 6, 18, 3333), (listener, 6, 9, 1), (listener, 6, 23, 5), (listener, 6, 7, 4)]
for one, level, option, value in wanted: one.setsockopt(level, option, value)
ready()
lost = [[level, option] for one, level, option, value in wanted if one.getsockopt(level, option) != value]
four.sendto(b"x", four.getsockname())
told = sorted([level, kind] for level, kind, _ in four.recvmsg(9, 1000)[1])
found(lost=lost, told=[one for one in told if one[0] == 0], member="030201EF" in open("/proc/net/igmp").read())
"""


@pytest.mark.parametrize("options", [(), ("--tcp", "established")], ids=["closed", "established"])
def test_what_was_chosen_for_sockets_comes_back(ours: Ctr, image: Path, options: Sequence[str]) -> None:
    if not dumps_sockets():
        pytest.skip("this CRIU dumps no network sockets on this kernel")
    answer = after_restore(ours, image, SOCKETS, *options)
    assert answer == {"lost": [], "told": [[0, 1], [0, 2], [0, 8]], "member": True}


# A segment, a set of semaphores and a queue of System V, which belong to the pod.
OBJECTS = """
libc.shmat.restype = ctypes.c_void_p
segment = libc.shmget(0x1234, 4096, 0o1600); memory = libc.shmat(segment, None, 0); ctypes.memmove(memory, b"kept", 4)
semaphores = libc.semget(0x1235, 1, 0o1600); libc.semctl(semaphores, 0, 16, 5)
queue = libc.msgget(0x1236, 0o1600); text = ctypes.create_string_buffer(struct.pack("l", 1) + b"told")
libc.msgsnd(queue, text, 4, 0)
ready()
found(memory=ctypes.string_at(memory, 4).decode(), value=libc.semctl(semaphores, 0, 12, 0),
      told=libc.msgrcv(queue, text, 100, 0, 0o4000), ids=[libc.shmget(0x1234, 4096, 0o600) == segment])
"""


def test_objects_of_system_v_stay_in_their_pod(tmp_path: Path) -> None:
    """The container starts again in the pod that has them, and another pod gets them with the first of two images."""
    cri = Cri()
    program = ["python3", "-c", PRELUDE + OBJECTS]
    with cri.pod(annotations={"kybernate.io/restore-from": "latest"}) as pod:
        name = pod.config.metadata.name
        cri.run(pod, "app", program, image=PYTHON)
        cri.await_log(pod, "app", "ready")
        cri.run(pod, "other", ["python3", "-c", PRELUDE + "ready()\nfound(alive=True)"], image=PYTHON)
        cri.await_log(pod, "other", "ready")
        kybernate("checkpoint", f"default/{name}/other", f"{name}-other")
        kybernate("checkpoint", f"default/{name}/app", f"{name}-app", "--exit")
        log = Path(pod.config.log_directory, "app.1.log")
        id = cri.run(pod, "app", program, image=PYTHON, attempt=1)
        assert cri.exec(id, "kill", "-USR1", "1")[0] == 0
        (said,) = eventually(lambda: re.findall(r"FOUND (.*)\n", log.read_text()))
        assert said == '{"memory": "kept", "value": 5, "told": 4, "ids": [true]}'
    both = {f"kybernate.io/restore-from.{one}": f"{name}-{one}" for one in ("app", "other")}
    with cri.pod(annotations=both) as pod:
        ids = [cri.run(pod, one, ["/never/run"], image=PYTHON) for one in ("other", "app")]
        assert [cri.exec(id, "kill", "-USR1", "1")[0] for id in ids] == [0, 0]
        eventually(lambda: all(any("FOUND" in line for line in cri.log(pod, one)) for one in ("other", "app")))
        assert any('"memory": "kept"' in line for line in cri.log(pod, "app"))
    for image in both.values():
        shutil.rmtree(ROOT / "default" / image)
    cri.close()
