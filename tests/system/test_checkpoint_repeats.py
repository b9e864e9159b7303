"""Checkpoints again and again, of the same image and side by side, and what of a process must come back each time."""

from __future__ import annotations

import asyncio
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message

from kybernate_shim.messages import task_pb2 as task
from kybernate_shim.messages.shim_pb2 import CheckpointRequest, CheckpointResponse
from kybernate_shim.ttrpc import Client, RpcError
from tests.system.checkpoints import (
    CHECKSUMMED,
    COUNT,
    LOOP,
    PYTHON,
    TASK,
    ask,
    assert_whole,
    counting,
    dumps_sockets,
    holding,
    restored,
    save,
)
from tests.system.cri import Cri, Pod
from tests.system.ctr import Ctr, eventually

FROM = "kybernate.io/restore-from"
GENERATIONS = 5
CYCLES_IN_PLACE = 40
CYCLES_MOVED = 10


@pytest.fixture
def cri() -> Iterator[Cri]:
    with Cri() as client:
        yield client


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A directory for images, which are too big to be kept until the next run."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


# -- again and again ---------------------------------------------------------------------------------------------------


def test_one_image_restores_into_three_pods_at_once(cri: Cri, pods_image: Path) -> None:
    image = pods_image
    with cri.pod() as pod:
        id = cri.run(pod, "c", COUNT)
        cri.await_log(pod, "c", "5")
        save(Ctr(namespace="k8s.io"), pod.id, image, id=id)
        reached = int(cri.log(pod, "c")[-1])
    with ExitStack() as pods, ThreadPoolExecutor(3) as at_once:
        three = [pods.enter_context(cri.pod(annotations={FROM: image.name})) for _ in range(3)]
        ids = list(at_once.map(lambda pod: cri.run(pod, "c", ["false"]), three))
        assert len({cri.pod_ip(pod) for pod in three}) == 3
        for pod, id in zip(three, ids, strict=True):
            cri.await_log(pod, "c", str(reached + 5))
            numbers = [int(line) for line in cri.log(pod, "c")]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            assert 5 <= numbers[0] <= reached + 1
            assert cri.exec(id, "hostname") == (0, f"{pod.config.hostname}\n")
        assert_whole(image)


def test_restored_container_is_checkpointed_again_five_generations_deep(ours: Ctr, scratch: Path) -> None:
    with ExitStack() as generations:
        first = counting(ours, "python3", "-c", CHECKSUMMED, "8", image=PYTHON)
        witness = generations.enter_context(first)
        for generation in range(GENERATIONS):
            image = scratch / str(generation)
            save(ours, witness.id, image, exit=True)
            manifest = assert_whole(image)
            assert manifest.source.container == witness.id
            next_one = restored(ours, image, log=witness.log, container_image=PYTHON)
            witness = generations.enter_context(next_one)
            witness.assert_goes_on()
        assert witness.numbers()[0] == 1


@pytest.mark.timeout(240)
def test_fifty_cycles_keep_the_memory(ours: Ctr, scratch: Path) -> None:
    """Memory is compared with its checksum between two numbers, so every number is a proof."""
    with ExitStack() as lives:
        witness = lives.enter_context(counting(ours, "python3", "-c", CHECKSUMMED, "8", image=PYTHON))
        image = scratch / "image"
        for cycle in range(CYCLES_IN_PLACE):
            seen = witness.count()
            save(ours, witness.id, image, rootfs_diff=False)
            shutil.rmtree(image)
            assert ours.status(witness.id) == "RUNNING", f"cycle {cycle}"
            eventually(lambda seen=seen: witness.count() > seen)  # type: ignore[misc]  # mypy wants it to have a type
        for _ in range(CYCLES_MOVED):
            image = scratch / witness.id
            save(ours, witness.id, image, exit=True)
            old, log = witness.id, witness.log
            witness = lives.enter_context(restored(ours, image, log=log, container_image=PYTHON))
            ours.remove(old)
            seen = witness.count()
            eventually(lambda seen=seen, witness=witness: witness.count() > seen + 1)  # type: ignore[misc]
            shutil.rmtree(image)
        witness.assert_goes_on()
        assert witness.numbers()[0] == 1


# -- side by side ------------------------------------------------------------------------------------------------------


def test_shim_answers_while_it_checkpoints(ours: Ctr, scratch: Path) -> None:
    with holding(ours, 1024) as witness:
        requests: dict[str, tuple[Message, type[Message]]] = {
            "State": (task.StateRequest(id=witness.id), task.StateResponse),
            "Stats": (task.StatsRequest(id=witness.id), task.StatsResponse),
            "Pids": (task.PidsRequest(id=witness.id), task.PidsResponse),
            "Kill": (task.KillRequest(id=witness.id, signal=0), Empty),
        }
        longest = dict.fromkeys(requests, 0.0)
        answers = dict.fromkeys(requests, 0)

        async def talk(client: Client) -> float:
            wanted = CheckpointRequest(id=witness.id, path=str(scratch / "image"))
            begin = time.monotonic()
            dump = asyncio.create_task(
                client.call("kybernate.shim.v1.Shim", "Checkpoint", wanted, CheckpointResponse, timeout=90)
            )
            await asyncio.sleep(0.05)
            while not dump.done():
                for method, (request, reply) in requests.items():
                    asked = time.monotonic()
                    await client.call(TASK, method, request, reply, timeout=30)
                    longest[method] = max(longest[method], time.monotonic() - asked)
                    answers[method] += 1
            await dump
            return time.monotonic() - begin

        took = ask(ours.namespace, witness.id, talk)
        print(f"checkpoint {took:.2f} s;", ", ".join(f"{n} {longest[n] * 1000:.0f} ms ({answers[n]})" for n in longest))
        assert_whole(scratch / "image")
        for method in requests:
            assert answers[method] > 3
            assert longest[method] < min(1.0, took / 2), f"{method} was answered after {longest[method]:.2f} s"
        witness.assert_goes_on()


# -- sockets -----------------------------------------------------------------------------------------------------------

ECHO = """
import select, socket
listeners = [socket.create_server(("0.0.0.0", 7000)), socket.create_server(("127.0.0.1", 7001))]
clients = []
print("ready", flush=True)
while True:
    for ready in select.select([*listeners, *clients], [], [])[0]:
        if ready in listeners:
            clients.append(ready.accept()[0])
            print("accepted", flush=True)
            continue
        try:
            data = ready.recv(100)
        except OSError:
            data = b""
        if data:
            ready.sendall(data)
        else:
            clients.remove(ready)
            print("lost", flush=True)
"""
# Both ends of a connection are in one process; a number is printed when it has gone through.
ASK_LOOPBACK = """
import socket
peer = socket.create_connection(("127.0.0.1", 7001))
peer.sendall(b"inside")
print(peer.recv(100).decode())
"""


def assert_told_of_the_newer_criu(ctr: Ctr, shim: str, image: Path, **request: str) -> None:
    with pytest.raises(RpcError, match=r"(?s)it continues as before.*CRIU before 4\.2.*install a newer one"):
        save(ctr, shim, image, **request)
    assert not image.exists()


def assert_echoes(peer: socket.socket, text: bytes) -> None:
    peer.sendall(text)
    assert peer.recv(100) == text


def test_connections_are_closed_and_listeners_survive_in_a_new_pod(cri: Cri, scratch: Path, pods_image: Path) -> None:
    image = pods_image
    with cri.pod() as pod:
        id = cri.run(pod, "c", ["python3", "-c", ECHO], image=PYTHON)
        cri.await_log(pod, "c", "ready")
        with socket.create_connection((cri.pod_ip(pod), 7000), timeout=10) as peer:
            assert_echoes(peer, b"before")
            if not dumps_sockets():
                assert_told_of_the_newer_criu(Ctr(namespace="k8s.io"), pod.id, image, id=id)
                assert_echoes(peer, b"it goes on")
                return
            save(Ctr(namespace="k8s.io"), pod.id, image, id=id)
            assert_echoes(peer, b"the old one goes on")
            save(Ctr(namespace="k8s.io"), pod.id, scratch / "last", id=id, exit=True)
            try:
                assert peer.recv(100) == b""  # the end of the connection, or the word that it is gone
            except ConnectionResetError:
                pass
    with cri.pod(annotations={FROM: image.name}) as pod:
        id = cri.run(pod, "c", ["false"], image=PYTHON)
        cri.await_log(pod, "c", "lost")
        with socket.create_connection((cri.pod_ip(pod), 7000), timeout=10) as peer:
            assert_echoes(peer, b"after")
            cri.await_log(pod, "c", "accepted")
        assert cri.exec(id, "python3", "-c", ASK_LOOPBACK) == (0, "inside\n")


@pytest.mark.parametrize("network", [["--net-host"], []], ids=["of the host", "its own, of which loopback comes back"])
def test_established_connection_goes_on_where_the_network_stays(ours: Ctr, scratch: Path, network: list[str]) -> None:
    here = [*network, "--annotation", "kybernate.io/tcp=established"]
    with counting(ours, "python3", "-c", LOOP, image=PYTHON, flags=here) as witness:
        if not dumps_sockets():
            assert_told_of_the_newer_criu(ours, witness.id, scratch / "image")
            witness.assert_goes_on()
            return
        save(ours, witness.id, scratch / "image")
        witness.assert_goes_on()
        save(ours, witness.id, scratch / "last", exit=True)
        eventually(lambda: ours.status(witness.id) in ("STOPPED", ""))
        with restored(ours, scratch / "last", log=witness.log, container_image=PYTHON, flags=here) as second:
            second.assert_goes_on()
            assert second.numbers()[0] == 1


# -- files -------------------------------------------------------------------------------------------------------------

# Does something of every kind, waits for a word, and says whether it has all come back.
FILES = """
import fcntl, os, shutil, socket, stat, time
os.unlink("/etc/nsswitch.conf")
shutil.rmtree("/home"); os.mkdir("/home"); open("/home/new", "w").write("new")
os.mkdir("/data")
open("/data/a", "w").write("linked"); os.link("/data/a", "/data/b")
os.chown("/data/a", 1234, 4321); os.chmod("/data/a", 0o640)
os.setxattr("/data", "user.kybernate", b"kept")
open("/dev/shm/file", "w").write("shared")
ghost = open("/tmp/ghost", "w+"); ghost.write("deleted but open"); ghost.flush(); os.unlink("/tmp/ghost")
lock = open("/data/lock", "w"); fcntl.flock(lock, fcntl.LOCK_EX)
near, far = socket.socketpair(); near.send(b"on its way")
os.mkfifo("/data/fifo"); fifo = os.open("/data/fifo", os.O_RDWR); os.write(fifo, b"in the pipe")
print("ready", flush=True)
while not os.path.exists("/data/go"):
    time.sleep(0.02)
status = os.stat("/data/b")
ghost.seek(0)
found = {
    "whiteout": not os.path.exists("/etc/nsswitch.conf"),
    "opaque": os.listdir("/home") == ["new"],
    "link": status.st_nlink == 2 and status.st_ino == os.stat("/data/a").st_ino,
    "owner": (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (1234, 4321, 0o640),
    "xattr": os.getxattr("/data", "user.kybernate") == b"kept",
    "shm": POD or open("/dev/shm/file").read() == "shared",
    "ghost": ghost.read() == "deleted but open" and not os.path.exists("/tmp/ghost"),
    "pair": far.recv(100) == b"on its way",
    "fifo": os.read(fifo, 100) == b"in the pipe" and stat.S_ISFIFO(os.stat("/data/fifo").st_mode),
}
print("lost:", *(name for name, there in found.items() if not there), flush=True)
time.sleep(1000)
"""
AS_ROOT = pytest.mark.as_root("it removes files of the image, and gives files to others")
TRY_LOCK = """
import fcntl
try:
    fcntl.flock(open("/data/lock"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("held")
"""


@AS_ROOT
def test_files_of_every_kind_come_back_in_a_new_pod(cri: Cri, pods_image: Path) -> None:
    """All but /dev/shm, which is the pod's and not the container's: the new pod has its own."""
    with cri.pod() as pod:
        id = cri.run(pod, "c", ["python3", "-c", f"POD = True\n{FILES}"], image=PYTHON)
        cri.await_log(pod, "c", "ready")
        save(Ctr(namespace="k8s.io"), pod.id, pods_image, id=id)
        assert_all_back(cri, pod, id)  # the dump must not have taken anything away either
    with cri.pod(annotations={FROM: pods_image.name}) as pod:
        assert_all_back(cri, pod, cri.run(pod, "c", ["false"], image=PYTHON))


def assert_all_back(cri: Cri, pod: Pod, id: str) -> None:
    assert cri.exec(id, "python3", "-c", TRY_LOCK) == (0, "held\n")
    assert cri.exec(id, "touch", "/data/go")[0] == 0
    cri.await_log(pod, "c", "lost:")


@AS_ROOT
def test_files_of_every_kind_come_back_in_a_new_container(ours: Ctr, scratch: Path) -> None:
    own, log = Ctr(image=PYTHON), scratch / "log"
    command = ["python3", "-c", f"POD = False\n{FILES}"]
    with own.running(*command, flags=["--log-uri", f"file://{log}"]) as id:
        eventually(lambda: "ready" in log.read_text())
        save(own, id, scratch / "image")
    with restored(ours, scratch / "image", log=log, container_image=PYTHON) as second:
        assert own.exec(second.id, "python3", "-c", TRY_LOCK) == "held\n"
        own.exec(second.id, "touch", "/data/go")
        eventually(lambda: log.read_text() == "ready\nlost:\n")


TERMINAL = ["sh", "-c", "test -t 0 && test -t 1 && i=0; while :; do i=$((i+1)); echo $i; sleep 0.05; done"]


def test_terminal_comes_back_in_a_new_pod(cri: Cri, pods_image: Path) -> None:
    image = pods_image
    with cri.pod() as pod:
        id = cri.run(pod, "c", TERMINAL, tty=True, stdin=True)
        cri.await_log(pod, "c", "5")
        save(Ctr(namespace="k8s.io"), pod.id, image, id=id)
        reached = int(cri.log(pod, "c")[-1])
        cri.await_log(pod, "c", str(reached + 3))
    with cri.pod(annotations={FROM: image.name}) as pod:
        id = cri.run(pod, "c", ["false"], tty=True, stdin=True)
        cri.await_log(pod, "c", str(reached + 5))
        assert cri.exec(id, "sh", "-c", "readlink /proc/1/fd/0")[1].startswith("/dev/pts/")
