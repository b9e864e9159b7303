"""Copies a stopped program's blocks into the arena, and has the program release them.

    prepare have the program export its blocks, map and hash them, and find room for them
    copy       have the program release them, and copy them into the arena

The program releases its blocks before they are copied where another process, the keeper, has descriptors of them: as
long as one of those is open, the memory is on the GPU, and another worker can copy it if this one dies. So the driver
checkpoints the program in parallel with the copies. Without a keeper, a block is released when it is in the arena.

A group of blocks is confirmed in the arena's record when its bytes are there. What the arena still has of an earlier
offload is not copied again where it has not changed. Between the hash of a piece and the end of its copy nothing
changes the piece: the program's threads are stopped and its work has drained, or it has released the memory. So the
hash is one of the bytes that were copied.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from kybernate_shim.arena.control import (
    NOT_IN_VRAM,
    PLACEHOLDERS,
    Block,
    BlockState,
    ControlFailed,
    ControlUnusable,
    Verb,
)
from kybernate_shim.arena.memory import KEY_BYTES, Memory
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.arena.pieces import PieceHashes, Update
from kybernate_shim.cuda_worker.calls import DriverRefused
from kybernate_shim.cuda_worker.copier import ArenaCopier, Mapped
from kybernate_shim.cuda_worker.deadline import JobDeadline
from kybernate_shim.cuda_worker.program_blocks import ProgramBlocks, batches, movable, require_possible
from kybernate_shim.errors import Refused
from kybernate_shim.worker_protocol.cuda_jobs import Copied, CopyEvent, MemoryReleased, MoveAnswer
from kybernate_shim.worker_protocol.messages import changed

GROUPS = 6  # of blocks that are copied one after the other: what one group holds is released before the next

Tell = Callable[[CopyEvent], None]


@dataclass
class _Ready:
    """Blocks that are mapped here, with the descriptor of each, or -1, and where they go."""

    wanted: Sequence[Block]
    mapped: list[Mapped] = field(default_factory=list)
    mappings: list[ExitStack] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    update: Update = field(default_factory=lambda: Update([], b"", [], 0, 0))
    answer: MoveAnswer = field(default_factory=MoveAnswer)


@dataclass
class PendingOffload:
    """The offload of one program. `stack` has what it needs until it is closed. `gpus` are those of its blocks."""

    memory: Memory
    copies: ArenaCopier
    owner: ArenaOwner
    program: ProgramBlocks
    stack: ExitStack
    gpus: set[int] = field(default_factory=set)
    _ready: _Ready | None = None

    def prepare(self) -> MoveAnswer:
        """Get everything ready that can be moved. Where that fails, nothing has changed."""
        program = self.program
        for verb in (Verb.CLOSE, Verb.FORGET):  # what a worker that died during a prepare has left
            program.ask(verb)
        program.ask(Verb.SHARE, first=0, count=0)  # is any block in a thread's hands?
        blocks = program.blocks()
        if any(block.state in NOT_IN_VRAM for block in blocks):
            raise ControlUnusable(f"process {program.pid} reports that a part of its memory is in the arena already")
        wanted = movable(blocks)
        left = sum(block.size for block in blocks if block.private)
        if not wanted:
            return MoveAnswer(left_bytes=left)
        require_possible(program.pid, wanted, self.copies.capacity)
        try:
            return self._prepare(_Ready(wanted), left)
        except BaseException:
            self._forget()
            raise

    def _prepare(self, ready: _Ready, left: int) -> MoveAnswer:
        copies, owner = self.copies, self.owner
        for batch in batches(ready.wanted):
            with self.program.handed_out(Verb.SHARE, BlockState.SHARED, batch) as descriptors:
                for descriptor, block in zip(descriptors, batch, strict=True):
                    mapping = self.stack.enter_context(ExitStack())
                    ready.mapped += mapping.enter_context(copies.mapped([descriptor], [block.size]))
                    ready.descriptors.append(_kept_open(descriptor, mapping))
                    ready.mappings.append(mapping)
        key = self.memory.copies(owner).key or os.urandom(KEY_BYTES)
        seen, blind = hashes_of(copies, ready.mapped, key)
        places = [(block.index, block.address, block.size) for block in ready.wanted]
        near = [copies.node_near(block.gpu) for block in ready.mapped]
        ready.update = self.memory.update(owner, places, seen, key if seen is not None else b"", near)
        self.gpus = {block.gpu for block in ready.mapped}
        size = sum(block.size for block in ready.wanted)
        clean, zero = ready.update.clean, ready.update.zero
        ready.answer = MoveAnswer(bytes=size, clean_bytes=clean, zero_bytes=zero, remark=blind, left_bytes=left)
        self._ready = ready
        return _with_descriptors(ready.answer, ready.wanted, ready.descriptors if self._has_room() else [])

    def _has_room(self) -> bool:
        """Return whether the program's placeholders have room on its GPUs before anything was released there."""
        return all(self.copies.free(gpu) >= PLACEHOLDERS for gpu in self.gpus)

    def copy(self, job: JobDeadline, tell: Tell, *, early: bool) -> MoveAnswer:
        """Copy what is ready, and have the program release it, before the copies if `early`.

        If it fails before the program has released something, nothing has changed. Later, a block that could not be
        copied is pending in the arena's record, and only the keeper has it.
        """
        ready, self._ready = self._ready, None
        assert ready is not None
        self.program = replace(self.program, job=job)
        early = early and self._released(ready, tell)
        try:
            self._copy(ready, job, tell, gently=early)
        except BaseException as error:
            if not early:
                self._undo(error)
            raise
        if not early:
            self.program.ask(Verb.RELEASE)
            self.program.ask(Verb.DISCARD)  # covers what a release has left without placeholders
            tell(MemoryReleased())
        return ready.answer

    def _released(self, ready: _Ready, tell: Tell) -> bool:
        """Have the program release everything now; return whether it has. The rest stays shared.

        Raises ControlUnusable where the program may still release it.
        """
        try:
            self.program.release(ready.wanted)
            self.program.ask(Verb.RELEASE)
        except ControlFailed:
            return False
        tell(MemoryReleased())
        return True

    def _copy(self, ready: _Ready, job: JobDeadline, tell: Tell, *, gently: bool) -> None:
        for group in groups([block.size for block in ready.wanted], GROUPS):
            self.copies.out(ready.mapped[group], ready.update.changed[group], job.check, gently=gently)
            self.memory.confirm(self.owner, ready.update.kept, group)  # before the memory is given up
            for mapping in ready.mappings[group]:
                mapping.close()
            tell(Copied(group.stop))

    def _undo(self, error: BaseException) -> None:
        self._forget()
        if any(block.state is BlockState.AWAY for block in self.program.blocks()):  # in any case: to be settled
            raise ControlUnusable(f"a part of its memory is in the arena: {error}") from error

    def _forget(self) -> None:
        """Leave the program as it was, with its memory in VRAM."""
        self.program.undo(Verb.FORGET)
        if not any(block.state is BlockState.AWAY for block in self.program.blocks()):
            self.memory.retire(self.owner)

    def abandon(self) -> None:
        """Forget what was got ready and is not copied."""
        if self._ready is not None:
            self._ready = None
            self._forget()


def _with_descriptors(answer: MoveAnswer, wanted: Sequence[Block], descriptors: Sequence[int]) -> MoveAnswer:
    """Return an answer with descriptors of this process, or without any where one is missing."""
    if not descriptors or -1 in descriptors:
        return answer
    pairs = tuple((block.index, descriptor) for block, descriptor in zip(wanted, descriptors, strict=True))
    return changed(answer, worker=os.getpid(), descriptors=pairs)


def _kept_open(descriptor: int, stack: ExitStack) -> int:
    """Return another descriptor for the same memory, -1 where there can be no more."""
    try:
        ours = os.dup(descriptor)
    except OSError:
        return -1
    stack.callback(os.close, ours)
    return ours


def hashes_of(copies: ArenaCopier, blocks: Sequence[Mapped], key: bytes) -> tuple[list[PieceHashes] | None, str]:
    """Return the hashes of blocks; where that cannot be, all of them are copied, and the second value says why."""
    try:
        return copies.look(blocks, key), ""
    except (Refused, DriverRefused) as error:
        return None, str(error)


def groups(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Cut what has these `sizes` into groups of about the same size, at most so many."""
    begin = size = 0
    whole = sum(sizes)
    for end, one in enumerate(sizes, 1):
        size += one
        if size * most >= whole or end == len(sizes):
            yield slice(begin, end)
            begin, size = end, 0
