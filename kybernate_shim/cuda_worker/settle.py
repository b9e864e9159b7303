"""Completes, towards VRAM, what an earlier job began with a stopped program, and reloads what the arena has of it.

The program makes new memory, every block is copied into it, and then the program commits: until then, the bytes are in
the arena. States AWAY and REBUILT in the program's table of blocks mean the arena, all others VRAM. The table is a
claim: only what the arena's own record confirms is ever copied to a program, and what arrives from an image only as far
as it has arrived (see `filling`). Where the arena has no hashes of what it keeps, as after a restore, they are computed
from the new memory. The arena keeps its copy: the next offload copies only what has changed since.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from kybernate_shim.arena.control import Block, BlockState, ControlUnusable, Verb
from kybernate_shim.arena.extents import Kept, total
from kybernate_shim.arena.memory import KEY_BYTES, Memory
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.arena.pieces import is_known
from kybernate_shim.arena.records import Record
from kybernate_shim.cuda_worker.copier import NOTHING, ArenaCopier, Mapped
from kybernate_shim.cuda_worker.filling import Filling, readable
from kybernate_shim.cuda_worker.offload import hashes_of
from kybernate_shim.cuda_worker.prefetch import ArenaPrefetch
from kybernate_shim.cuda_worker.program_blocks import ProgramBlocks, batches
from kybernate_shim.cuda_worker.room import RoomWait, as_room_comes
from kybernate_shim.worker_protocol.cuda_jobs import MoveAnswer


@dataclass(frozen=True)
class Settling:
    """The settling of one program.

    `copier` returns our end of the copies, which is made when there is something to copy. `gently` says whether copies
    to these GPUs have to leave room for others on the link. `hashing` is False where no hashes are to be computed.
    `room` is what another process gives up for this one.
    """

    memory: Memory
    copier: Callable[[], ArenaCopier]
    owner: ArenaOwner
    program: ProgramBlocks
    gently: Callable[[set[int]], bool]
    hashing: bool
    room: RoomWait | None = None

    def undo_begun(self) -> None:
        """Have the program undo what an earlier job began and did not finish."""
        for verb in (Verb.CLOSE, Verb.FORGET, Verb.DISCARD):
            self.program.ask(verb)

    def reload(self, record: Record, prefetch: ArenaPrefetch | None) -> MoveAnswer:
        """Copy what `record` has of the program into new memory of it; what has been prefetched is on the GPU already.

        The prefetch continues while the program makes its memory, unless the room for that is still to come.
        """
        blind = ""
        stop = prefetch.stop if prefetch is not None else lambda: NOTHING
        away = places((block for block in self.program.blocks() if block.state is BlockState.AWAY), record)
        filling = Filling(self.memory, record, self.program.job.check)
        try:
            with ExitStack() as stack:
                blocks: list[Mapped] = []
                if self.room is not None:
                    stop()  # it takes room
                for group in as_room_comes(away, self.room):
                    new = [one for batch in batches(group) for one in self._made(batch, stack)]
                    there = stop()
                    gently = self.gently({block.gpu for block in new})
                    for portion in filling.portions(group):
                        self.copier().back(new, portion, there, gently=gently, check=self.program.job.check)
                    if prefetch is not None and self.room is not None:
                        prefetch.used(extent for one in group for extent in one.extents)
                    blocks += new
                if self.hashing:
                    blind = self._learn(record, away, blocks)
        except BaseException:
            self.program.undo(Verb.DISCARD)
            raise
        self.program.ask(Verb.COMMIT)
        self.memory.retire(self.owner)
        size = sum(one.size for one in away)
        zero = size - sum(total(one.extents) for one in away)
        return MoveAnswer(bytes=size, zero_bytes=zero, prefetched_bytes=stop().size, remark=blind)

    def _made(self, batch: Sequence[Kept], stack: ExitStack) -> list[Mapped]:
        """Have the program make its memory for some blocks, and map it here until `stack` is closed."""
        with self.program.handed_out(Verb.REBUILD, BlockState.REBUILT, batch) as descriptors:
            return stack.enter_context(self.copier().mapped(descriptors, [one.size for one in batch]))

    def _learn(self, record: Record, reloaded: Sequence[Kept], blocks: Sequence[Mapped]) -> str:
        """Hash what was `reloaded` and is in `blocks` now, unless that is known; return why it cannot be.

        It only spares the next offload some copies, so it is done only where nothing has to be compiled for it.
        """
        unknown = [(one, block) for one, block in zip(reloaded, blocks, strict=True) if not is_known(one)]
        if not unknown or not self.copier().looks_at_once(blocks):
            return ""
        key = record.key or os.urandom(KEY_BYTES)
        seen, blind = hashes_of(self.copier(), [block for _, block in unknown], key)
        marks = {one.index: look.marks for (one, _), look in zip(unknown, seen or [], strict=seen is not None)}
        if marks:
            kept = [replace(one, marks=marks.get(one.index, one.marks)) for one in readable(record)]
            self.memory.learn(self.owner, replace(record, kept=kept, key=key, pending=[], filler=None))
        return blind


def places(blocks: Iterable[Block], record: Record) -> list[Kept]:
    """Return where the bytes of blocks are. Raises ControlUnusable where the arena has no matching ones."""
    kept = {(one.index, one.address, one.size): one for one in readable(record)}
    pending = {(one.index, one.address, one.size) for one in record.pending}
    found = []
    for block in blocks:
        wanted = (block.index, block.address, block.size)
        if (place := kept.get(wanted)) is None:
            why = "they were never copied, and the process has released them" if wanted in pending else "they are lost"
            why = f"they are parked in {record.parked}" if record.parked else why
            raise ControlUnusable(f"the bytes of block {block.index} are not in the arena: {why}")
        found.append(place)
    return found
