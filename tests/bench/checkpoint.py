"""Checkpoint and restore through `ctr`, of processes that hold 16 MiB, 256 MiB and 2 GiB.

Timed is one `ctr` command from its start to its end, as a user would wait for it. After every restore the process has
to prove, outside the timed part, that its memory is what it was.

Checkpoints are measured with the directory in memory in which containerd has the image written and takes it from. On a
disk, some or all of 2 GiB is being written back, whatever the shim, when containerd removes them: that took 0.2 to
4.3 s of a command, and 0.2 to 0.5 s in memory.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.bench.figures import Pair, seconds
from tests.bench.memory_holder import command, proof_file
from tests.lab.syscalls import mount, umount
from tests.system.ctr import KYBERNATE, STOCK, Ctr, eventually

PYTHON = "localhost:5000/python:latest"
SIZES = {"16MiB": 16, "256MiB": 256, "2GiB": 2048}
TEMPORARY = Path("/tmp")  # containerd's, which has neither XDG_RUNTIME_DIR nor TMPDIR in the lab
DOORS = ("checkpoint.task", "checkpoint.container", "restore.container")


class MemoryChanged(AssertionError):
    """A restored process has not the memory that was checkpointed."""


@dataclass
class Holder:
    """One running container that holds memory, and what it once proved. `ctr` knows the shim that runs it."""

    ctr: Ctr
    id: str
    proof: str

    def checkpoint_task(self) -> float:
        """Return the seconds of `ctr task checkpoint`."""
        before = self._images()
        cost = seconds(lambda: self.ctr("task", "checkpoint", self.id, timeout=300))
        self._forget(self._images() - before)
        return cost

    def checkpoint_container(self) -> float:
        """Return the seconds of `ctr container checkpoint --task`."""
        image = self.ctr.new_id("image")
        cost = seconds(lambda: self.checkpoint_into(image))
        self._forget({image})
        return cost

    def checkpoint_into(self, image: str) -> None:
        self.ctr("container", "checkpoint", "--task", self.id, image, timeout=300)

    def _images(self) -> set[str]:
        return set(self.ctr("images", "ls", "-q").split())

    def _forget(self, images: set[str]) -> None:
        self.ctr("images", "rm", "--sync", *sorted(images), timeout=120)


@dataclass
class Frozen:
    """A checkpoint in containerd's content store, to be restored again and again."""

    ctr: Ctr
    image: str
    proof: str

    def restore(self) -> float:
        """Return the seconds of `ctr container restore --live`, after a look at what came back."""
        id = self.ctr.new_id("restored")
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
    return [f"{door}.{size}" for door in DOORS]


def pairs(size: str) -> Iterator[Pair]:
    """Yield the comparisons of one size: checkpoints that leave the process running, then restores of a last one.

    Containers and images live for as long as the comparisons that need them are measured.
    """
    task, container, restore = names(size)
    with ExitStack() as images:
        with ExitStack() as running:
            ours, stock = (running.enter_context(holder(runtime, SIZES[size])) for runtime in (KYBERNATE, STOCK))
            with _temporary_in_memory():
                yield Pair(task, ours.checkpoint_task, stock.checkpoint_task)
                yield Pair(container, ours.checkpoint_container, stock.checkpoint_container)
            ours_frozen, stock_frozen = (images.enter_context(frozen(source)) for source in (ours, stock))
        yield Pair(restore, ours_frozen.restore, stock_frozen.restore)


@contextmanager
def _temporary_in_memory() -> Iterator[None]:
    mount("tmpfs", TEMPORARY, "tmpfs", data="mode=1777")
    try:
        yield
    finally:
        umount(TEMPORARY)


@contextmanager
def frozen(source: Holder) -> Iterator[Frozen]:
    """Keep a checkpoint of `source`, which need not live any longer, until the body ends."""
    image = source.ctr.new_id("frozen")
    source.checkpoint_into(image)
    try:
        yield Frozen(source.ctr, image, source.proof)
    finally:
        source.ctr("images", "rm", "--sync", image, timeout=120)
