"""A program's memory in many blocks: some are released while others are still copied, and none is ever lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.arena.control import BlockState, Verb, control_of
from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.gpu.helper_client import CudaHelper, log_path
from kybernate_shim.gpu.sequence import Suspended, resume, suspend
from tests.contract.cuda_driver.copying import COPY, HASHES, until
from tests.contract.cuda_driver.cycles import LIMITS, cycle
from tests.contract.cuda_driver.helper_processes import arenas_worker
from tests.fakes.cuda import Gpus
from tests.fakes.cuda.programs import Holder

Run = Callable[[Callable[[CudaHelper], Any]], Any]
Hold = Callable[..., Holder]

pytestmark = pytest.mark.root
MIB = 1 << 20
SIZE = 64 * MIB
PIECE = 2 * MIB
BLOCKS = 10


@pytest.fixture
def hold(start_holder: Hold) -> Hold:
    """Start a Holder of BLOCKS allocations of a piece."""
    return partial(start_holder, BLOCKS, allocations=BLOCKS)


async def out(helper: CudaHelper, holder: Holder) -> Suspended:
    return await suspend(helper, lambda: [holder.pid], LIMITS, arena=True)


def states(holder: Holder) -> set[BlockState]:
    control = control_of(holder.pid)
    assert control is not None
    with control:
        return {block.state for block in control.blocks()}


def test_all_are_away_and_come_back(use_arena: Run, hold: Hold, gpus: Gpus, memory: Memory) -> None:
    holder = hold()

    async def body(helper: CudaHelper) -> None:
        for piece in range(3):
            taken = (await out(helper, holder)).taken
            assert taken.bytes == BLOCKS * PIECE
            assert states(holder) == {BlockState.AWAY}
            await resume(helper, [holder.pid], limits=LIMITS)
            assert states(holder) == {BlockState.HERE}
            assert holder.is_right()
            holder.fill(piece, 100)

    use_arena(body)
    assert memory.free() == SIZE


@pytest.mark.parametrize("nth", range(1, 45, 4))
def test_call_of_the_program_that_fails_loses_nothing(use_arena: Run, hold: Hold, nth: int) -> None:
    """In the first cycle it exports, releases, makes and maps: four calls and more for each block."""
    holder = hold(switches=f"vmm:{4 * BLOCKS + nth}:2")

    async def body(helper: CudaHelper) -> None:
        for _ in range(2):
            await cycle(helper, holder.pid)
            assert holder.is_right()

    use_arena(body)
    assert states(holder) == {BlockState.HERE}


@pytest.mark.parametrize("how", ["1", "crash"])
@pytest.mark.parametrize("nth", [15, 45, 56, 67, 78])
def test_worker_that_fails_between_two_blocks_loses_nothing(
    use_arena: Run, hold: Hold, gpus: Gpus, socket: Path, monkeypatch: pytest.MonkeyPatch, how: str, nth: int
) -> None:
    """A call fails in each worker; or one worker dies, and another one ends what that has begun."""
    if how != "crash":
        monkeypatch.setenv("FAKE_CUDA_FAIL", f"vmm:{nth}:{how}")
    holder = hold()

    async def body(helper: CudaHelper) -> None:
        if how == "crash":
            await helper.warm([holder.pid], 20)
            gpus.switch(f"vmm:{nth}:crash@{arenas_worker(socket).pid}")
        for _ in range(2):
            taken = (await out(helper, holder)).taken
            assert taken.bytes == BLOCKS * PIECE or taken.reasons
            await resume(helper, [holder.pid], limits=LIMITS)
            assert holder.is_right()

    use_arena(body)
    assert states(holder) == {BlockState.HERE}


@pytest.fixture
def stubborn(hold: Hold) -> Holder:
    """A program that does not release one of its blocks when it is first asked to."""
    return hold(switches=f"vmm:{4 * BLOCKS + BLOCKS + 2 * 2 + 1}:2")


def test_block_that_is_released_at_the_second_attempt_is_away(use_arena: Run, stubborn: Holder) -> None:
    async def body(helper: CudaHelper) -> None:
        taken = (await out(helper, stubborn)).taken
        assert taken.bytes == BLOCKS * PIECE
        assert states(stubborn) == {BlockState.AWAY}
        await resume(helper, [stubborn.pid], limits=LIMITS)

    use_arena(body)
    assert stubborn.is_right()


def test_program_that_releases_no_block_goes_on_with_all(
    use_arena: Run, hold: Hold, gpus: Gpus, memory: Memory, socket: Path
) -> None:
    """It does not release its first block at both attempts: what is in the arena comes back before it continues."""
    holder = hold()

    async def body(helper: CudaHelper) -> None:
        await helper.warm([holder.pid], 20)
        worker = arenas_worker(socket).pid

        def copies() -> int:
            return [(one.pid, one.name) for one in gpus.calls()].count((worker, COPY))

        gpus.record()
        gpus.switch(f"{COPY}:{HASHES}:hold@{worker}")
        suspending = asyncio.ensure_future(out(helper, holder))
        await until(lambda: copies() == HASHES)
        gpus.switch(f"vmm:1:2@{holder.pid},{COPY}:1:hold@{worker}")
        await until(lambda: copies() > HASHES)
        gpus.switch(f"vmm:1:2@{holder.pid}")
        taken = (await suspending).taken
        assert taken.bytes == 0
        assert "answers release with: CUDA error 2" in taken.reasons[holder.pid]
        assert states(holder) == {BlockState.HERE}
        await resume(helper, [holder.pid], limits=LIMITS)

    use_arena(body)
    assert holder.is_right()
    assert memory.kept(ArenaOwner.of(holder.pid)) == []
    assert '"event": "arena.settled"' in log_path(socket).read_text()


def test_older_library_releases_all_in_the_end(use_arena: Run, hold: Hold, older: Callable[[str], Path]) -> None:
    """A container that was started before an upgrade of the node has one that does not know of LET_GO."""
    holder = hold(library=older("LET_GO"))
    control = control_of(holder.pid)
    assert control is not None
    with control, pytest.raises(Exception, match="let_go with: Invalid argument"):
        control.ask(Verb.LET_GO, seconds=5)

    async def body(helper: CudaHelper) -> None:
        for _ in range(2):
            assert (await out(helper, holder)).taken.bytes == BLOCKS * PIECE
            assert states(holder) == {BlockState.AWAY}
            await resume(helper, [holder.pid], limits=LIMITS)
            assert holder.is_right()

    use_arena(body)
