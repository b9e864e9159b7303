"""Checkpoint and restore through `ctr`, of processes that hold 16 MiB, 256 MiB and 2 GiB.

Timed is one `ctr` command from its start to its end, as a user would wait for it. After every restore the process has
to prove, outside the timed part, that its memory is what it was.

Where in the machine's memory a process or an image lies makes a checkpoint of 2 GiB up to a tenth slower, for as long
as it lies there, and which of two lies better is decided when they are made. So each checkpoint is that of a new
container, and restores have two images a shim, which were made in an order that favours neither.

The directory in which containerd has an image written, or unpacks it, is in memory. On a disk, some or all of 2 GiB is
being written back, whatever the shim, when containerd removes them: that took 0.2 to 4.3 s of a command, and 0.2 to
0.5 s in memory. After a restore containerd never removes them, so that each left more to be written back.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path

from tests.bench.figures import Pair, seconds
from tests.bench.memory_holder import command, proof_file
from tests.lab.syscalls import MNT_DETACH, mount, umount
from tests.system.ctr import KYBERNATE, STOCK, Ctr, eventually

PYTHON = "localhost:5000/python:latest"
SIZES = {"16MiB": 16, "256MiB": 256, "2GiB": 2048}
TEMPORARY = Path("/tmp")  # containerd's, which has neither XDG_RUNTIME_DIR nor TMPDIR in the lab
ENTRY_POINTS = ("checkpoint.task", "checkpoint.container", "restore.container")


class MemoryChanged(AssertionError):
    """A restored process has not the memory that was checkpointed."""


@dataclass
class Holder:
    """One running container that holds memory, and what it has proved. `ctr` knows the shim that runs it."""

    ctr: Ctr
    id: str
    proof: str

    def checkpoint_task(self) -> None:
        self.ctr("task", "checkpoint", self.id, timeout=300)

    def checkpoint_container(self) -> None:
        self.checkpoint_into(self.ctr.new_id("image"))

    def checkpoint_into(self, image: str) -> None:
        self.ctr("container", "checkpoint", "--task", self.id, image, timeout=300)


@dataclass
class Frozen:
    """A checkpoint in containerd's content store, to be restored again and again."""

    ctr: Ctr
    image: str
    proof: str

    def restore(self) -> float:
        """Return the seconds of `ctr container restore --live`, after a look at what came back."""
        id = self.ctr.new_id("restored")
        with _temporary_in_memory():
            try:
                cost = seconds(lambda: self.ctr("container", "restore", "--live", id, self.image, timeout=300))
                pid = self.ctr.pid(id)
                os.kill(pid, signal.SIGUSR1)
                if (found := read_proof(pid)) != self.proof:
                    raise MemoryChanged(f"{self.ctr.runtime}: {found} after the restore, {self.proof} before")
                return cost
            finally:
                self.ctr.remove(id)


@contextmanager
def holder(runtime: str, mib: int) -> Iterator[Holder]:
    """Run a container that holds `mib` MiB until the body ends."""
    ctr = Ctr(runtime, image=PYTHON)
    with ctr.running(*command(mib)) as id:
        yield Holder(ctr, id, read_proof(ctr.pid(id)))


def read_proof(pid: int) -> str:
    """Return what the process writes as soon as it is there."""
    return eventually(proof_file(pid).read_text, seconds=120)


def names(size: str) -> list[str]:
    """Return the names of the comparisons of one size."""
    return [f"{entry_point}.{size}" for entry_point in ENTRY_POINTS]


def pairs(size: str) -> Iterator[Pair]:
    """Yield the comparisons of one size: checkpoints that leave the process running, and restores."""
    task, container, restore = names(size)
    mib = SIZES[size]
    yield _checkpoints(task, mib, Holder.checkpoint_task)
    yield _checkpoints(container, mib, Holder.checkpoint_container)
    with ExitStack() as stack:
        images: dict[str, list[Frozen]] = {KYBERNATE: [], STOCK: []}
        for runtime in (KYBERNATE, STOCK, STOCK, KYBERNATE):
            images[runtime].append(stack.enter_context(frozen(runtime, mib)))
        os.sync()  # else they are written back while the first of them are restored
        ours, stock = (cycle(images[runtime]) for runtime in (KYBERNATE, STOCK))
        yield Pair(restore, lambda: next(ours).restore(), lambda: next(stock).restore())


def _checkpoints(name: str, mib: int, checkpoint: Callable[[Holder], None]) -> Pair:
    return Pair(name, *(partial(_checkpointed, runtime, mib, checkpoint) for runtime in (KYBERNATE, STOCK)))


def _checkpointed(runtime: str, mib: int, checkpoint: Callable[[Holder], None]) -> float:
    """Return the seconds of a checkpoint of a new container."""
    with holder(runtime, mib) as it, _temporary_in_memory():
        before = _images(it.ctr)
        cost = seconds(lambda: checkpoint(it))
        it.ctr("images", "rm", "--sync", *sorted(_images(it.ctr) - before), timeout=120)
        return cost


def _images(ctr: Ctr) -> set[str]:
    return set(ctr("images", "ls", "-q").split())


@contextmanager
def _temporary_in_memory() -> Iterator[None]:
    mount("tmpfs", TEMPORARY, "tmpfs", data="mode=1777")
    try:
        yield
    finally:
        umount(TEMPORARY, MNT_DETACH)  # some program that was at work there may only just be leaving


@contextmanager
def frozen(runtime: str, mib: int) -> Iterator[Frozen]:
    """Keep a checkpoint of a container that is gone until the body ends."""
    with holder(runtime, mib) as source, _temporary_in_memory():
        image = source.ctr.new_id("frozen")
        source.checkpoint_into(image)
    try:
        yield Frozen(source.ctr, image, source.proof)
    finally:
        source.ctr("images", "rm", "--sync", image, timeout=120)
