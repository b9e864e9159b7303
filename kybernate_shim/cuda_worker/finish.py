"""Copies what a program has released, and a worker that has died has not copied, from the keeper's descriptors.

The arena's record names the room for it, which is pending. Only a block that the program itself has no longer is
copied: what it still has may change.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import groupby

from kybernate_shim.arena.control import BlockState, ControlInvalid, Verb, take_descriptor
from kybernate_shim.arena.extents import Kept, parts
from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.cuda_worker.copier import ArenaCopier
from kybernate_shim.cuda_worker.program_blocks import BATCH, ProgramBlocks
from kybernate_shim.worker_protocol.cuda_jobs import MoveAnswer


def finish(
    memory: Memory, copies: ArenaCopier, owner: ArenaOwner, program: ProgramBlocks, keeper: int, kept: Mapping[int, int]
) -> MoveAnswer:
    """Copy what is pending; `kept` are descriptors of process `keeper` by the blocks' indexes.

    Raises ControlInvalid where a block that the program has released is in no place, OSError where the keeper has
    ended, and ControlSilent where the program does not answer: it may be about to release more.
    """
    program.ask(Verb.CLOSE)  # behind what it was asked before
    record = memory.record(owner)
    memory.learn(owner, record)  # a confirmation counts blocks as they are in the file: in this order from now on
    blocks = [*record.kept, *record.pending]
    states = {(block.index, block.address, block.size): block.state for block in program.blocks()}
    away = [
        number
        for number, one in enumerate(blocks)
        if number >= len(record.kept) and states.get((one.index, one.address, one.size)) is BlockState.AWAY
    ]
    if missing := [blocks[number].index for number in away if blocks[number].index not in kept]:
        raise ControlInvalid(f"the bytes of blocks {missing} are neither in the arena nor kept")
    pidfd = os.pidfd_open(keeper)
    try:
        for group in _groups(away):
            _copy_group(copies, program, pidfd, blocks[group], kept)
            memory.confirm(owner, blocks, group)
    finally:
        os.close(pidfd)
    return MoveAnswer(bytes=sum(blocks[number].size for number in away))


def _copy_group(
    copies: ArenaCopier, program: ProgramBlocks, pidfd: int, blocks: list[Kept], kept: Mapping[int, int]
) -> None:
    with ExitStack() as stack:
        descriptors = []
        for one in blocks:
            descriptors.append(take_descriptor(pidfd, kept[one.index]))
            stack.callback(os.close, descriptors[-1])
        mapped = stack.enter_context(copies.mapped(descriptors, [one.size for one in blocks]))
        copies.out(mapped, [list(parts(one.extents)) for one in blocks], program.job.check)


def _groups(numbers: list[int]) -> Iterator[slice]:
    """Cut increasing numbers into runs without a gap, each of at most a batch."""
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        for at in range(0, len(found), BATCH):
            part = found[at : at + BATCH]
            yield slice(part[0], part[-1] + 1)
