"""Copies a stopped program's blocks into the arena, and has the program release them.

Until a block is released, its bytes are in VRAM. A group of blocks is confirmed in the arena's record when its bytes
are there, before the program is asked to release them. What the arena still has of an earlier offload is not copied
again where it has not changed. Between the hash of a piece and the end of its copy nothing changes the piece, because
the program's threads are stopped and its work has drained: so the hash is one of the bytes that were copied.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

from kybernate_shim.arena.control import NOT_IN_VRAM, Block, BlockState, ControlInvalid, Verb
from kybernate_shim.arena.memory import KEY_BYTES, Memory
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.arena.pieces import PieceHashes
from kybernate_shim.cuda_worker.calls import DriverRefused
from kybernate_shim.cuda_worker.copier import ArenaCopier, Mapped
from kybernate_shim.cuda_worker.kernel import KernelUnavailable
from kybernate_shim.cuda_worker.program_blocks import ProgramBlocks, batches, movable, require_possible
from kybernate_shim.worker_protocol.cuda_jobs import MoveAnswer
from kybernate_shim.worker_protocol.messages import changed

GROUPS = 6  # of blocks that are copied one after the other: what one group had is released under the copies of the next


@dataclass
class Offload:
    """The offload of one program. `cards` are those that its bytes were copied from."""

    memory: Memory
    copies: ArenaCopier
    owner: ArenaOwner
    program: ProgramBlocks
    cards: set[int] = field(default_factory=set)

    def run(self) -> MoveAnswer:
        program = self.program
        for verb in (Verb.CLOSE, Verb.FORGET):  # what a worker has left that died while it got ready
            program.ask(verb)
        program.ask(Verb.SHARE, first=0, count=0)  # is any block in a thread's hands?
        blocks = program.blocks()
        if any(block.state in NOT_IN_VRAM for block in blocks):
            raise ControlInvalid(f"process {program.pid} reports that a part of its memory is in the arena already")
        wanted = movable(blocks)
        left = sum(block.size for block in blocks if block.private)
        if not wanted:
            return MoveAnswer(left_bytes=left)
        require_possible(program.pid, wanted, self.copies.capacity)
        answer = self._copied_or_forgotten(wanted)
        program.ask(Verb.RELEASE)
        return changed(answer, left_bytes=left)

    def _copied_or_forgotten(self, wanted: Sequence[Block]) -> MoveAnswer:
        try:
            return self._copy(wanted)
        except BaseException as error:
            self.program.undo(Verb.FORGET)
            if any(block.state is BlockState.AWAY for block in self.program.blocks()):  # in any case: to be settled
                raise ControlInvalid(f"a part of its memory is in the arena: {error}") from error
            self.memory.retire(self.owner)
            raise

    def _copy(self, wanted: Sequence[Block]) -> MoveAnswer:
        """Have the arena hold what is in the blocks `wanted`, of which some may stay shared."""
        copies, owner = self.copies, self.owner
        with ExitStack() as stack:
            blocks: list[Mapped] = []
            mappings: list[ExitStack] = []
            for batch in batches(wanted):
                with self.program.handed_out(Verb.SHARE, BlockState.SHARED, batch) as descriptors:
                    for descriptor, block in zip(descriptors, batch, strict=True):
                        mappings.append(stack.enter_context(ExitStack()))
                        blocks += mappings[-1].enter_context(copies.mapped([descriptor], [block.size]))
            key = self.memory.copies(owner).key or os.urandom(KEY_BYTES)
            seen, blind = hashes_of(copies, blocks, key)
            places = [(block.index, block.address, block.size) for block in wanted]
            near = [copies.node_near(block.card) for block in blocks]
            update = self.memory.update(owner, places, seen, key if seen is not None else b"", near)
            with ThreadPoolExecutor(1) as releasing:
                released = []
                for group in groups([block.size for block in wanted], GROUPS):
                    copies.out(blocks[group], update.changed[group], self.program.job.check)
                    self.memory.confirm(owner, update.kept, group)  # before the program gives its own up
                    for mapping in mappings[group]:
                        mapping.close()
                    released.append(releasing.submit(self.program.release, wanted[group]))
                for one in released:
                    one.result()
        self.cards = {block.card for block in blocks}
        size = sum(block.size for block in wanted)
        return MoveAnswer(bytes=size, clean_bytes=update.clean, zero_bytes=update.zero, remark=blind)


def hashes_of(copies: ArenaCopier, blocks: Sequence[Mapped], key: bytes) -> tuple[list[PieceHashes] | None, str]:
    """Return the hashes of blocks; where that cannot be, all of them are copied, and the second value says why."""
    try:
        return copies.look(blocks, key), ""
    except (KernelUnavailable, DriverRefused) as error:
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
