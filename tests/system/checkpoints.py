"""Checkpoints as users make them, and containers whose log proves that they continue where they were."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from kybernate_shim.checkpoint.criu.versions import parse_version
from kybernate_shim.checkpoint.image.manifest import Manifest
from kybernate_shim.checkpoint.image.store import read_image
from kybernate_shim.checkpoint.image.verification import verify
from kybernate_shim.messages.shim_pb2 import CheckpointRequest, CheckpointResponse
from kybernate_shim.start import socket_path
from kybernate_shim.ttrpc import Client, RpcError
from tests.system.ctr import Ctr, eventually, finished, run

PYTHON = "localhost:5000/python:latest"
MANIFEST = "kybernate-manifest.json"
ADDRESS = "/run/containerd/containerd.sock"
TASK = "containerd.task.v2.Task"
PROMPTLY = 3.0  # seconds for what must not wait for a checkpoint or a restore

COUNT = ["sh", "-c", "i=0; while :; do i=$((i+1)); echo $i; sleep 0.05; done"]
# Counts as well, and checks all of its memory between two numbers; a damaged byte ends it.
CHECKSUMMED = """
import hashlib, os, sys, time
memory = bytearray(b"".join(os.urandom(1 << 20) for _ in range(int(sys.argv[1]))))
digest = hashlib.sha256(memory).digest()
number = 0
while True:
    assert hashlib.sha256(memory).digest() == digest, "the memory has changed"
    number += 1
    print(number, flush=True)
    time.sleep(0.05)
"""
# Holds that many MiB and only counts, for a dump that takes its time.
HOLDING = """
import os, sys, time
piece = os.urandom(1 << 20)
memory = [bytearray(piece) for _ in range(int(sys.argv[1]))]
number = 0
while True:
    number += 1
    print(number, flush=True)
    time.sleep(0.05)
"""
# Counts as well, while its init is nearly always in the middle of a vfork: the child waits for a FIFO to be opened
# before it executes its program, which another process does that many seconds later, or never if it is 0.
VFORKING = """
import os, sys, time
os.mkfifo("/tmp/fifo")
seconds = float(sys.argv[1])
if os.fork() == 0:
    number = 0
    while True:
        number += 1
        print(number, flush=True)
        time.sleep(0.05)
if seconds and os.fork() == 0:
    while True:
        time.sleep(seconds)
        os.close(os.open("/tmp/fifo", os.O_WRONLY))
while True:
    wait_for_it = (os.POSIX_SPAWN_OPEN, 9, "/tmp/fifo", os.O_RDONLY, 0)
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}, file_actions=[wait_for_it]), 0)
"""
# Counts by what comes back to it over a TCP connection of its own.
LOOP = """
import socket, time
listener = socket.create_server(("127.0.0.1", 0))
near = socket.create_connection(listener.getsockname())
far = listener.accept()[0]
number = 0
while True:
    number += 1
    near.sendall(b"%d\\n" % number)
    print(far.recv(100).decode().strip(), flush=True)
    time.sleep(0.05)
"""

T = TypeVar("T")


def kybernate(*args: str, **options: Any) -> str:
    """Run the command line and return what it printed."""
    return run(["kybernate", *args], **options)


def refused(*argv: str) -> str:
    """Run a command that must fail, and return what it wrote to stderr."""
    done = finished(argv)
    assert done.returncode != 0, f"{' '.join(argv)} succeeded: {done.stdout.decode(errors='replace')}"
    return done.stderr.decode()


def save(ctr: Ctr, shim: str, image: Path, **request: Any) -> CheckpointResponse:
    """Write a checkpoint image, as `kybernate checkpoint` asks the shim to. Raises RpcError.

    `shim` is the container, or the pod where `id` names the container.
    """

    async def call(client: Client) -> CheckpointResponse:
        wanted = CheckpointRequest(**{"id": shim, "path": str(image), "rootfs_diff": True, **request})
        return await client.call("kybernate.shim.v1.Shim", "Checkpoint", wanted, CheckpointResponse, timeout=60)

    answer: CheckpointResponse = ask(ctr.namespace, shim, call)
    return answer


def assert_whole(image: Path) -> Manifest:
    """Compare every byte of the image with its digests, and return its manifest."""
    assert not verify(image)
    return read_image(image).manifest


def assert_no_image(image: Path) -> None:
    """Fail if anything in the directory could be taken for a checkpoint image or a part of one."""
    left = [path.name for path in image.iterdir() if path.suffix != ".log"] if image.is_dir() else []
    assert not left, f"left in {image}: {left}"


@dataclass
class Witness:
    """A container that writes 1, 2, 3 … into a file on the host, by whatever command it is restored."""

    id: str
    log: Path

    def numbers(self) -> list[int]:
        """Return what it has written, without a line that is not finished."""
        lines = self.log.read_text().split("\n")[:-1] if self.log.exists() else []
        return [int(line) for line in lines]

    def count(self) -> int:
        return (self.numbers() or [0])[-1]

    def assert_goes_on(self) -> None:
        """It counts, and has never left a number out or begun again."""
        seen = self.count()
        eventually(lambda: self.count() > seen + 2)
        numbers = self.numbers()
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))

    def assert_stands_still(self) -> None:
        seen = self.count()
        time.sleep(0.3)
        assert self.count() == seen


@contextmanager
def counting(
    ctr: Ctr, *command: str, image: str = "", flags: Sequence[str] = (), log: Path | None = None
) -> Iterator[Witness]:
    """Run a counting container that has begun to count."""
    id = ctr.new_id()
    own = Ctr(ctr.runtime, ctr.namespace, image or ctr.image)
    log = log or Path(f"/tmp/{id}.out")
    try:
        with own.running(*(command or COUNT), id=id, flags=["--log-uri", f"file://{log}", *flags]):
            witness = Witness(id, log)
            eventually(lambda: witness.count() > 2, seconds=40)
            yield witness
    finally:
        log.unlink(missing_ok=True)


def holding(ctr: Ctr, mib: int, **options: Any) -> Any:
    """Run a counting container that holds so many MiB of memory."""
    return counting(ctr, "python3", "-c", HOLDING, str(mib), image=PYTHON, **options)


@contextmanager
def restored(
    ctr: Ctr,
    image: Path,
    *command: str,
    log: Path,
    flags: Sequence[str] = (),
    container_image: str = "",
    id: str = "",
) -> Iterator[Witness]:
    """Restore an image into a new container by its annotation; the command given to containerd must not run."""
    id = id or ctr.new_id("r")
    own = Ctr(ctr.runtime, ctr.namespace, container_image or ctr.image)
    flags = ["--log-uri", f"file://{log}", "--annotation", f"kybernate.io/restore-from={image}", *flags]
    with own.running(*(command or ["false"]), id=id, flags=flags):
        yield Witness(id, log)


def dumps_sockets() -> bool:
    """Tell whether this CRIU can dump network sockets on this kernel: before 4.2 it cannot on Linux 6.16 and later."""
    criu = parse_version(run(["criu", "--version"]).split("Version:")[1].split()[0])
    return criu >= (4, 2) or parse_version(os.uname().release) < (6, 16)


@contextmanager
def small_disk(at: Path, mib: int, *, inodes: int = 0) -> Iterator[Path]:
    """Mount a disk of so many MiB at a directory, which is made; it holds so many files, 0 for any number."""
    at.mkdir(parents=True, exist_ok=True)
    run(["mount", "-t", "tmpfs", "-o", f"size={mib}m,nr_inodes={inodes}", "tmpfs", str(at)])
    try:
        yield at
    finally:
        eventually(lambda: run(["umount", str(at)]) == "")


# -- processes of a node --------------------------------------------------------------------------------------------


def shim_of(ctr: Ctr, id: str) -> psutil.Process:
    """Return the daemon of a container: the parent of its init."""
    parent = psutil.Process(ctr.pid(id)).parent()
    assert parent is not None
    return parent


def ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True  # between the two looks


def named(program: str) -> list[psutil.Process]:
    """Return the processes of that name, which may end at any time."""
    found = []
    for comm in Path("/proc").glob("[0-9]*/comm"):  # much quicker than psutil, for those who must not come too late
        try:
            if comm.read_text().strip() == program:
                found.append(psutil.Process(int(comm.parent.name)))
        except (OSError, psutil.NoSuchProcess):
            continue
    return found


def first(program: str) -> psutil.Process:
    """Return the running `program`; of CRIU's processes the one that leads the others, which bear its name as well."""
    return min(named(program), key=lambda process: process.pid)


def working(program: str, verb: str = "") -> psutil.Process:
    """Wait for a running `program` (criu, runc) with `verb` in its arguments, and return it."""

    def find() -> list[psutil.Process]:
        return [process for process in named(program) if not verb or verb in process.cmdline()]

    return eventually(find, pause=0.005)[0]


def grown(path: Path, size: int) -> bool:
    """Tell whether a file has that many bytes by now."""
    return path.exists() and path.stat().st_size >= size


def in_the_middle(image: Path, mib: int = 32) -> None:
    """Wait until a dump into `image` has written so much of the memory."""
    eventually(lambda: any(grown(pages, mib << 20) for pages in image.glob("pages-*.img")), pause=0.002)


@contextmanager
def in_background(work: Callable[[], T]) -> Iterator[Future[T]]:
    """Run `work` in a thread in parallel with the block, which does not end before it."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(work)


def failure_of(work: Future[Any], *, seconds: float = 30) -> str:
    """Wait for what must fail, and return the text of its error."""
    error = work.exception(seconds)
    assert error is not None, f"it succeeded: {work.result()}"
    assert isinstance(error, RpcError | ConnectionError), repr(error)
    return str(error)


def kill(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGKILL)


# -- the shim's socket ----------------------------------------------------------------------------------------------


def ask(namespace: str, id: str, talk: Callable[[Client], Any]) -> Any:
    """Run the coroutine function `talk` with a connection to the container's shim, past containerd."""

    async def connected() -> Any:
        client = await Client.connect(str(socket_path(ADDRESS, namespace, id)), timeout=5)
        try:
            return await talk(client)
        finally:
            await client.close()

    return asyncio.run(connected())
