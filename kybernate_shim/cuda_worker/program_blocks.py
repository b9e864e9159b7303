"""A program as one job sees it: the blocks of its preload library, and descriptors of ours for them.

The table of blocks is the program's, so the arena treats it as a claim, and compares each block when it is exported.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from kybernate_shim.arena.control import (
    MOST_BLOCKS,
    Block,
    BlockState,
    Control,
    ControlFailed,
    ControlUnusable,
    Verb,
    control_of,
    take_descriptor,
)
from kybernate_shim.arena.extents import Kept
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.cuda_worker.deadline import JobDeadline

BATCH = 64  # blocks handed out at a time: the program may have few descriptors left

T = TypeVar("T")


@dataclass(frozen=True)
class ProgramBlocks:
    """A process's control page, a descriptor of the process, and the time limit for it."""

    control: Control
    pidfd: int
    job: JobDeadline

    @property
    def pid(self) -> int:
        return self.control.pid

    def blocks(self, first: int = 0, count: int = MOST_BLOCKS) -> list[Block]:
        return self.control.blocks(first, count)

    def ask(self, verb: Verb, first: int = 0, count: int = MOST_BLOCKS) -> None:
        self.control.ask(verb, seconds=self.job.left(), first=first, count=count)

    def undo(self, verb: Verb) -> None:
        """Request what leaves the process in order, even when the job's time is over."""
        self.control.ask(verb, seconds=self.job.undo_left())

    def release(self, group: Sequence[Block]) -> None:
        """Have the program release blocks whose bytes are in the arena; RELEASE does it for older libraries."""
        first, last = group[0].index, group[-1].index
        try:
            self.ask(Verb.LET_GO, first=first, count=last - first + 1)
        except ControlFailed as error:
            if error.code != -errno.EINVAL:
                raise

    def descriptor_of(self, block: Block) -> int:
        """Return a descriptor of ours for a block that the running program may have freed. Raises ControlFailed."""
        try:
            return take_descriptor(self.pidfd, block.descriptor)
        except OSError as error:
            if error.errno == errno.EBADF:
                raise ControlFailed(Verb.SHARE, -errno.EBUSY) from error
            raise

    @contextmanager
    def handed_out(self, verb: Verb, state: BlockState, batch: Sequence[Block] | Sequence[Kept]) -> Iterator[list[int]]:
        """Have the program hand out the blocks of `batch` and yield descriptors of ours for them, in its order."""
        first, count = batch[0].index, batch[-1].index - batch[0].index + 1
        descriptors: list[int] = []
        try:
            self.ask(verb, first=first, count=count)
            blocks = {block.index: block for block in self.blocks(first, count)}
            for one in batch:
                block = blocks.get(one.index)
                if block is None or (block.address, block.size, block.state) != (one.address, one.size, state):
                    raise ControlUnusable(f"block {one.index} of process {self.pid} has changed while it was moved")
                descriptors.append(take_descriptor(self.pidfd, block.descriptor))
            yield descriptors
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
            self.undo(Verb.CLOSE)


@contextmanager
def opened(owner: ArenaOwner, job: JobDeadline) -> Iterator[ProgramBlocks]:
    """Open a process's page, and a descriptor of the process. Raises ControlUnusable where it has no such page.

    Both are of `owner`, and not of a process that has reused its pid: that is checked when both are open.
    """
    pidfd = os.pidfd_open(owner.pid)
    try:
        control = control_of(owner.pid)
        if control is None:
            raise ControlUnusable(f"process {owner.pid} has not loaded the preload library")
        with control:
            if not owner.alive:
                raise ControlUnusable(f"process {owner.pid} has ended")
            yield ProgramBlocks(control, pidfd, job)
    finally:
        os.close(pidfd)


def movable(blocks: Sequence[Block]) -> list[Block]:
    """Return those in VRAM that the arena may have."""
    return [block for block in blocks if block.state is BlockState.HERE and not block.private]


def require_possible(pid: int, blocks: Sequence[Block], capacity: int) -> None:
    """Raise ControlUnusable where the blocks exceed the memory of all GPUs, before their number matters anywhere."""
    if (size := sum(block.size for block in blocks)) > capacity:
        raise ControlUnusable(
            f"process {pid} reports that it has {size >> 20} MiB of VRAM, and all GPUs {capacity >> 20}"
        )


def batches(blocks: Sequence[T]) -> Iterator[Sequence[T]]:
    for at in range(0, len(blocks), BATCH):
        yield blocks[at : at + BATCH]


def small_batches(blocks: Sequence[Kept], most: int) -> Iterator[Sequence[Kept]]:
    """Yield batches of at most `most` bytes, but of one block at least."""
    for batch in batches(blocks):
        begin = size = 0
        for number, block in enumerate(batch):
            if number > begin and size + block.size > most:
                yield batch[begin:number]
                begin, size = number, 0
            size += block.size
        yield batch[begin:]
