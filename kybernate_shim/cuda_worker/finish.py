"""Copies what a program has released, and a worker that has died has not copied, from the keeper's descriptors.

The arena's record names the room for it, which is pending. Only a block that the program itself no longer has is
copied: one that it still has may change.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from kybernate_shim.arena.control import BlockState, ControlUnusable, Verb, take_descriptor
from kybernate_shim.arena.extents import Kept, parts
from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.cuda_worker.copier import ArenaCopier
from kybernate_shim.cuda_worker.program_blocks import ProgramBlocks
from kybernate_shim.worker_protocol.cuda_jobs import MoveAnswer


def finish(
    memory: Memory, copies: ArenaCopier, owner: ArenaOwner, program: ProgramBlocks, keeper: int, kept: Mapping[int, int]
) -> MoveAnswer:
    """Copy what is pending; `kept` are descriptors of process `keeper` by the blocks' indexes.

    Raises ControlUnusable where a block that the program has released is lost, or where the program does not answer (it
    may be about to release more), and OSError where the keeper has ended.
    """
    program.ask(Verb.CLOSE)  # behind what it was asked before
    record = memory.record(owner)
    if record.parked:  # so all of it had been copied
        return MoveAnswer()
    memory.learn(owner, record)  # a confirmation counts blocks as they are in the file: in this order from now on
    blocks = [*record.kept, *record.pending]
    states = {(block.index, block.address, block.size): block.state for block in program.blocks()}
    away = [
        number
        for number, one in enumerate(blocks)
        if number >= len(record.kept) and states.get((one.index, one.address, one.size)) is BlockState.AWAY
    ]
    if missing := [blocks[number].index for number in away if blocks[number].index not in kept]:
        raise ControlUnusable(f"the bytes of blocks {missing} are neither in the arena nor kept")
    pidfd = os.pidfd_open(keeper)
    try:
        for number in away:  # each by itself: if this worker dies as well, the next one has less to do
            _copy_block(copies, program, pidfd, blocks[number], kept)
            memory.confirm(owner, blocks, slice(number, number + 1))
    finally:
        os.close(pidfd)
    return MoveAnswer(bytes=sum(blocks[number].size for number in away))


def _copy_block(copies: ArenaCopier, program: ProgramBlocks, pidfd: int, block: Kept, kept: Mapping[int, int]) -> None:
    descriptor = take_descriptor(pidfd, kept[block.index])
    try:
        with copies.mapped([descriptor], [block.size]) as mapped:
            copies.out(mapped, [list(parts(block.extents))], program.job.check)
    finally:
        os.close(descriptor)
