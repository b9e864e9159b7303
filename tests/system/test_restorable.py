"""A container ends only with an image that restores: everything that a program may have open, and what is refused."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import users
from tests.system.checkpoints import PYTHON, assert_no_image, dumps_sockets, kybernate, refused
from tests.system.cri import Cri, Pod
from tests.system.ctr import Ctr, eventually

# Of tests in which root can do more.
BOTH = [pytest.param("root", marks=pytest.mark.as_root("it changes files of others")), "user"]
# A program prepares something, says so, and after a signal what it has found.
PRELUDE = """
import ctypes, json, os, select, shutil, signal, socket, stat, struct, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
libc = ctypes.CDLL(None, use_errno=True)
def ready():
    print("ready", flush=True)
    signal.sigwait([signal.SIGUSR1])
def found(**what):
    print("FOUND " + json.dumps(what), flush=True)
    signal.pause()
"""


@dataclass
class Program:
    """A program in a container, and the file that it writes to."""

    ctr: Ctr
    id: str
    log: Path

    def found(self) -> dict[str, Any]:
        """Let it look, and return what it has found."""
        self.ctr("task", "kill", "-s", "SIGUSR1", self.id)
        texts = eventually(lambda: re.findall(r"FOUND (.*)\n", self.log.read_text()))
        answer: dict[str, Any] = json.loads(texts[0])
        return answer


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "image"
    shutil.rmtree(tmp_path, ignore_errors=True)


def volume_of(place: Path) -> Path:
    """Make a directory that any user can write to."""
    volume = place / "volume"
    volume.mkdir()
    volume.chmod(0o777)
    return volume


@contextmanager
def running(ctr: Ctr, image: Path, program: str, flags: Sequence[str] = ()) -> Iterator[Program]:
    """Run a program that is ready."""
    log = image.parent / "log"
    own = Ctr(ctr.runtime, ctr.namespace, PYTHON)
    with own.running("python3", "-c", PRELUDE + program, flags=["--log-uri", f"file://{log}", *flags]) as id:
        eventually(lambda: is_ready(log), seconds=40)
        yield Program(own, id, log)


def is_ready(log: Path) -> bool:
    said = log.read_text() if log.exists() else ""
    assert "ready" in said, said[-2000:]
    return True


@contextmanager
def restored(ctr: Ctr, image: Path, flags: Sequence[str] = ()) -> Iterator[Program]:
    log = image.parent / "log.restored"
    own = Ctr(ctr.runtime, ctr.namespace, PYTHON)
    annotation = ["--annotation", f"kybernate.io/restore-from={image}"]
    with own.running("/never/run", flags=["--log-uri", f"file://{log}", *annotation, *flags]) as id:
        yield Program(own, id, log)


def after_restore(
    ctr: Ctr, image: Path, program: str, *options: str, flags: Sequence[str] = (), leave: bool = False
) -> dict[str, Any]:
    """Checkpoint a program, restore it, and return what it finds then; with `leave`, it also finds it where it was."""
    with running(ctr, image, program, flags) as first:
        kybernate("checkpoint", first.id, str(image), *options, *([] if leave else ["--exit"]))
        before = first.found() if leave else {}
    with restored(ctr, image, flags) as second:
        answer = second.found()
    assert not leave or before == answer
    return answer


def refusal(ctr: Ctr, image: Path, program: str, *options: str) -> str:
    """Return why a program cannot be checkpointed; it runs on, and there is no image."""
    with running(ctr, image, program) as one:
        said = refused("kybernate", "checkpoint", one.id, str(image), "--exit", *options)
        assert_no_image(image)
        assert ctr.status(one.id) == "RUNNING"
        assert all(one.found().values())
        assert f"python3[{ctr.pid(one.id)}]" in said
    return said


# Files that were rotated by a link: two of them had one name after the other, one is in another directory, and one
# that had the same name has none any more. One is only mapped.
LINKED = """
import mmap
os.makedirs("/tmp/data/old")
names = ["app.log.1", "app.log.2", "old/app.log.3"]
def rotated(former, name):
    file = open("/tmp/data/" + former, "w+"); file.write("one "); file.flush()
    if name: os.link(file.name, "/tmp/data/" + name)
    os.unlink(file.name)
    return file
files = [rotated("app.log", names[0]), rotated("app.log", names[1]), rotated("third", names[2])]
nameless = rotated("app.log", "")
mapped = rotated("map", "old/map"); mapped.truncate(4096)
memory = mmap.mmap(mapped.fileno(), 4096); mapped.close()
ready()
for file in files: file.write("two"); file.flush()
memory[4:8] = b"more"
there = [os.stat("/tmp/data/" + name).st_ino for name in names]
found(
    texts=[open("/tmp/data/" + name).read() for name in names],
    same=[os.fstat(file.fileno()).st_ino for file in files] == there,
    mapped=open("/tmp/data/old/map", "rb").read(8).decode(),
    nameless=os.fstat(nameless.fileno()).st_nlink,
    names=sorted(os.listdir("/tmp/data")), old=sorted(os.listdir("/tmp/data/old")),
)
"""


@pytest.mark.parametrize("leave", [False, True], ids=["exit", "leave"])
def test_file_whose_own_name_is_gone_comes_back_with_its_other_name(ours: Ctr, image: Path, leave: bool) -> None:
    assert after_restore(ours, image, LINKED, leave=leave) == {
        "texts": ["one two"] * 3,
        "same": True,
        "mapped": "one more",
        "nameless": 0,
        "names": ["app.log.1", "app.log.2", "old"],
        "old": ["app.log.3", "map"],
    }


def test_file_whose_own_name_is_gone_comes_back_when_connections_move(ours: Ctr, image: Path) -> None:
    """CRIU itself ends the container then, but not before its image is complete."""
    assert after_restore(ours, image, LINKED, "--tcp", "established")["same"]


def test_file_of_a_volume_whose_own_name_is_gone_comes_back(ours: Ctr, image: Path, tmp_path: Path) -> None:
    volume = volume_of(tmp_path)
    program = LINKED.replace("/tmp/data", "/volume/data")
    flags = ["--mount", f"type=bind,src={volume},dst=/volume,options=rbind:rw"]
    answer = after_restore(ours, image, program, flags=flags)
    assert (answer["texts"], answer["mapped"], answer["same"]) == (["one two"] * 3, "one more", True)
    assert {path.name for path in (volume / "data").iterdir()} == {"app.log.1", "app.log.2", "old"}  # no link of CRIU's


def test_file_without_another_name_within_reach_is_refused(ours: Ctr, image: Path, tmp_path: Path) -> None:
    """The volume shows a part of a filesystem, and the other name is in another part."""
    volume_of(tmp_path)
    program = """
f = open("/volume/a", "w+"); f.write("kept"); f.flush()
ready()
f.seek(0)
found(text=f.read() == "kept")
"""
    mount = ["--mount", f"type=bind,src={tmp_path / 'volume'},dst=/volume,options=rbind:rw"]
    with running(ours, image, program, mount) as one:
        os.link(tmp_path / "volume/a", tmp_path / "outside")
        (tmp_path / "volume/a").unlink()
        said = refused("kybernate", "checkpoint", one.id, str(image), "--exit")
        assert f"python3[{ours.pid(one.id)}] has '/volume/a' open as its descriptor" in said
        assert "no other name was found in the filesystem at /volume" in said
        assert_no_image(image)
        assert one.found() == {"text": True}


NESTED = """
os.makedirs("/tmp/job/here/deep"); os.chdir("/tmp/job/here/deep")
outer = os.open("/tmp/job", os.O_RDONLY | os.O_DIRECTORY)
file = open("/tmp/job/here/f", "w+"); file.write("kept"); file.flush()
shutil.rmtree("/tmp/job")
ready()
file.seek(0)
try: os.getcwd(); gone = False
except FileNotFoundError: gone = True
found(gone=gone, empty=os.listdir(outer) == [], text=file.read() == "kept", absent=not os.path.exists("/tmp/job"))
"""


def test_deleted_directories_within_each_other_come_back(ours: Ctr, image: Path) -> None:
    assert all(after_restore(ours, image, NESTED).values())


SOCKETS = """
os.makedirs("/tmp/srv/made"); os.makedirs("/tmp/srv/app")
def bound(path):
    one = socket.socket(socket.AF_UNIX); one.bind(path); one.listen(); return one
renamed = bound("/tmp/srv/app/tmp"); os.rename("/tmp/srv/app/tmp", "/tmp/srv/app/final")
moved = bound("/tmp/srv/made/s"); os.rename("/tmp/srv/made", "/tmp/srv/kept")
away = bound("/tmp/srv/app/s"); os.rename("/tmp/srv/app/s", "/tmp/srv/kept/other")
ready()
def talks(path, listener):
    client = socket.socket(socket.AF_UNIX); client.connect(path); peer = listener.accept()[0]
    client.send(b"hi"); return peer.recv(9) == b"hi"
found(
    renamed=talks("/tmp/srv/app/final", renamed),
    moved=talks("/tmp/srv/kept/s", moved), away=talks("/tmp/srv/kept/other", away),
    names=sorted(os.listdir("/tmp/srv")) == ["app", "kept"], inside=os.listdir("/tmp/srv/app") == ["final"],
)
"""


def test_renamed_sockets_are_where_they_were(ours: Ctr, image: Path) -> None:
    assert after_restore(ours, image, SOCKETS) == dict.fromkeys(("renamed", "moved", "away", "names", "inside"), True)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            """
os.makedirs("/tmp/srv"); s = socket.socket(socket.AF_UNIX); s.bind("/tmp/srv/a"); s.listen()
os.link("/tmp/srv/a", "/tmp/srv/b"); os.unlink("/tmp/srv/a")
ready()
c = socket.socket(socket.AF_UNIX); c.connect("/tmp/srv/b")
found(connected=True)
""",
            "; its name was removed while its file has another",
        ),
        (
            """
os.makedirs("/tmp/srv"); s = socket.socket(socket.AF_UNIX); s.bind("/tmp/srv/a"); s.listen()
os.rename("/tmp/srv/a", "/tmp/srv/b")
t = socket.socket(socket.AF_UNIX); t.bind("/tmp/srv/a"); t.listen()
ready()
for name in "ab": c = socket.socket(socket.AF_UNIX); c.connect("/tmp/srv/" + name)
found(connected=True)
""",
            "which was renamed to '/tmp/srv/b'; another socket is bound to that path now",
        ),
        (
            """
e = select.epoll(); r, w = os.pipe(); e.register(r, select.EPOLLIN)
if os.fork() == 0: os.close(w); time.sleep(1000)
os.close(r); os.write(w, b"x")
ready()
found(event=len(e.poll(1)) == 1)
""",
            "when it was added and that the process does not have open itself, but python3[",
        ),
    ],
    ids=["linked socket", "socket replaced", "epoll"],
)
def test_what_cannot_come_back_is_refused_with_its_process(ours: Ctr, image: Path, program: str, words: str) -> None:
    assert words in refusal(ours, image, program)


def test_container_that_criu_would_end_goes_on_where_the_proof_fails(ours: Ctr, image: Path) -> None:
    program = """
os.makedirs("/tmp/srv"); s = socket.socket(socket.AF_UNIX); s.bind("/tmp/srv/a"); s.listen()
os.link("/tmp/srv/a", "/tmp/srv/b"); os.unlink("/tmp/srv/a")
ready()
c = socket.socket(socket.AF_UNIX); c.connect("/tmp/srv/b")
found(connected=True)
"""
    assert "its name was removed while its file has another" in refusal(ours, image, program, "--tcp", "established")


def test_program_in_memory_is_refused(ours: Ctr, image: Path) -> None:
    program = """
started, say = os.pipe()
os.set_inheritable(say, True)
child = os.fork()
if child == 0:
    fd = os.memfd_create("packed", 0); os.sendfile(fd, os.open("/bin/sh", os.O_RDONLY), 0, 1 << 26)
    os.execve(fd, ["packed", "-c", f"echo >&{say}; while :; do sleep 1000; done"], {})
os.read(started, 1)
ready()
found(alive=os.waitpid(child, os.WNOHANG) == (0, 0))
"""
    with running(ours, image, program) as one:
        said = refused("kybernate", "checkpoint", one.id, str(image), "--exit")
        assert "executes '/memfd:packed', a file in memory" in said
        assert_no_image(image)
        assert one.found() == {"alive": True}


# A file of the image, which its owner alone can change, and what the program has made itself.
INOTIFY = """
root = os.getuid() == 0
os.makedirs("/tmp/srv/conf"); open("/tmp/srv/conf/a", "w").write("1")
n = libc.inotify_init1(os.O_NONBLOCK)
paths = {b"/usr/lib/os-release": 0x4 if root else 0x20, b"/tmp/srv/conf/a": 0x2, b"/tmp/srv/conf": 0x100}
watches = [libc.inotify_add_watch(n, path, mask) for path, mask in paths.items()]
ready()
os.chmod("/usr/lib/os-release", 0o640) if root else open("/usr/lib/os-release").close()
open("/tmp/srv/conf/a", "a").write("2"); open("/tmp/srv/conf/new", "w").close()
seen, at = set(), 0
events = os.read(n, 4096)
while at < len(events):
    watch, mask, _, length = struct.unpack_from("iIII", events, at)
    seen.add((watch, mask)); at += 16 + length
found(seen=[pair in seen for pair in zip(watches, paths.values())])
"""


@pytest.mark.parametrize("who", BOTH)
def test_watches_of_the_root_filesystem_come_back(ours: Ctr, image: Path, who: str) -> None:
    assert after_restore(ours, image, INOTIFY) == {"seen": [True, True, True]}


def test_file_of_a_volume_may_grow_where_a_program_appends(ours: Ctr, image: Path, tmp_path: Path) -> None:
    volume = volume_of(tmp_path)
    program = """
f = open("/volume/log", "a+"); f.write("one\\n"); f.flush()
ready()
f.write("two\\n"); f.flush()
found(text=open("/volume/log").read())
"""
    flags = ["--mount", f"type=bind,src={volume},dst=/volume,options=rbind:rw"]
    with running(ours, image, program, flags) as first:
        kybernate("checkpoint", first.id, str(image), "--exit")
    with (volume / "log").open("a") as file:
        file.write("other\n")
    with restored(ours, image, flags) as second:
        assert second.found() == {"text": "one\nother\ntwo\n"}


def test_changed_file_is_refused_where_it_is_not_saved(ours: Ctr, image: Path) -> None:
    program = """
os.makedirs("/tmp/srv"); f = open("/tmp/srv/f", "w+"); f.write("kept"); f.flush()
ready()
f.seek(0)
found(text=f.read() == "kept")
"""
    said = refusal(ours, image, program, "--no-rootfs")
    assert re.search(r"has '/tmp/srv/f' open as its descriptor \d: it is open, and is one of the changed files", said)
    assert "Leave --no-rootfs away" in said


def test_read_only_root_filesystem_stays_read_only(ours: Ctr, image: Path) -> None:
    program = """
open("/dev/shm/x", "w").write("kept")
ready()
try: open("/made", "w"); writable = True
except OSError as error: writable = False
found(writable=writable, shm=open("/dev/shm/x").read())
"""
    assert after_restore(ours, image, program, flags=["--read-only"]) == {"writable": False, "shm": "kept"}


OWN_IDS = """
os.makedirs("/tmp/srv"); f = open("/tmp/srv/f", "w+"); f.write("kept"); f.flush()
if os.getuid() == 0: os.chown("/tmp/srv/f", 7, 8)
ready()
owner = os.stat("/tmp/srv/f")
open("/tmp/srv/f", "a").write(" and more")
f.seek(0)
found(owner=[owner.st_uid, owner.st_gid], text=f.read(), user=os.getuid(), directory=os.stat("/tmp/srv").st_uid)
"""


@pytest.mark.parametrize("first", [100_000, 300_000], ids=["same ids", "other ids"])
@pytest.mark.parametrize("who", BOTH)
def test_container_with_ids_of_its_own_comes_back_with_a_range_of_the_nodes(
    ours: Ctr, image: Path, who: str, first: int
) -> None:
    """As pods with `hostUsers: false`, each of which gets another range."""
    user, owner = (0, [7, 8]) if who == "root" else (users.UID, [users.UID, users.UID])
    with running(ours, image, OWN_IDS, _own_ids(100_000)) as one:
        kybernate("checkpoint", one.id, str(image), "--exit")
    with restored(ours, image, _own_ids(first)) as two:
        ranges = Path(f"/proc/{ours.pid(two.id)}/uid_map").read_text().split()
        assert two.found() == {"owner": owner, "text": "kept and more", "user": user, "directory": user}
        assert ranges == ["0", str(first), "65536"]


def _own_ids(first: int) -> list[str]:
    return ["--uidmap", f"0:{first}:65536", "--gidmap", f"0:{first}:65536"]


# -- pods -------------------------------------------------------------------------------------------------------------

COUNTER = ["sh", "-c", "i=0; while :; do i=$((i+1)); echo $i; sleep 0.05; done"]


@pytest.fixture
def cri() -> Iterator[Cri]:
    with Cri() as client:
        yield client


def counted(cri: Cri, pod: Pod, place: Path) -> str:
    """Count in a pod, checkpoint the container with its end, and return the image's name for other pods."""
    cri.run(pod, "counter", COUNTER)
    cri.await_log(pod, "counter", "5")
    kybernate("checkpoint", f"default/{pod.config.metadata.name}", str(place), "--exit")
    return place.name


def test_restored_pod_sees_no_cgroups_but_its_own(cri: Cri, pods_image: Path) -> None:
    """And is checkpointed again as it is."""
    show = "cat /proc/self/cgroup; echo; grep ' - cgroup ' /proc/self/mountinfo || true"
    with cri.pod() as pod:
        image = counted(cri, pod, pods_image)
    with cri.pod(annotations={"kybernate.io/restore-from": image}) as pod:
        id = cri.run(pod, "counter", ["/never/run"])
        cgroups, mounts = cri.exec(id, "sh", "-c", show)[1].split("\n\n")
        own = {line.split(":", 2)[2] for line in cgroups.splitlines()}
        assert {line.split()[3] for line in mounts.splitlines()} <= own
        kybernate("checkpoint", f"default/{pod.config.metadata.name}", str(pods_image.with_name("again")))
        shutil.rmtree(pods_image.with_name("again"))


def test_pod_in_the_network_of_its_node_comes_back(cri: Cri, pods_image: Path) -> None:
    with cri.pod(host_network=True) as pod:
        image = counted(cri, pod, pods_image)
    with cri.pod(host_network=True, annotations={"kybernate.io/restore-from": image}) as pod:
        cri.run(pod, "counter", ["/never/run"])
        assert int(eventually(lambda: cri.log(pod, "counter"))[0]) > 5


OWN_ADDRESS = """
import socket, sys
resolver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); resolver.connect(("10.88.0.1", 53))
own = resolver.getsockname()[0]
server = socket.create_server((own, 9000))
print("ready", flush=True)
while True:
    client, peer = server.accept()
    client.sendall(repr((own, server.getsockname()[0], resolver.getsockname()[0], resolver.getpeername()[0])).encode())
    client.close()
"""


def test_sockets_of_the_pods_own_address_are_those_of_the_new_pods(cri: Cri, pods_image: Path) -> None:
    """A listener there, and a connected socket of UDP, such as that of a resolver."""
    if not dumps_sockets():
        pytest.skip("this CRIU dumps no network sockets on this kernel")

    def asked(pod: Pod) -> tuple[str, ...]:
        with socket.create_connection((cri.pod_ip(pod), 9000), timeout=20) as client:
            return tuple(ast.literal_eval(client.makefile().read()))

    with cri.pod() as pod:
        cri.run(pod, "app", ["python3", "-c", OWN_ADDRESS], image=PYTHON)
        cri.await_log(pod, "app", "ready")
        old = cri.pod_ip(pod)
        assert asked(pod) == (old, old, old, "10.88.0.1")
        kybernate("checkpoint", f"default/{pod.config.metadata.name}", str(pods_image), "--exit")
        with cri.pod(annotations={"kybernate.io/restore-from": pods_image.name}) as other:
            cri.run(other, "app", ["/never/run"], image=PYTHON)
            new = cri.pod_ip(other)
            assert new != old
            assert asked(other) == (old, new, new, "10.88.0.1")
