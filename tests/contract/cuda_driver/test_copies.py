"""The driver checkpoints a program while its memory is still copied into the arena, whatever dies meanwhile."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from kybernate_shim.arena.control import BlockState, control_of
from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.gpu.errors import CudaError
from kybernate_shim.gpu.helper_answers import State
from kybernate_shim.gpu.helper_client import CudaHelper
from kybernate_shim.gpu.sequence import StepSeconds, resume, suspend
from tests.contract.cuda_driver.copying import COPY, HASHES, until
from tests.contract.cuda_driver.cycles import LIMITS
from tests.contract.cuda_driver.helper_processes import arenas_worker, kill, kill_helper
from tests.fakes.cuda import Gpus
from tests.fakes.cuda.programs import Holder

Run = Callable[[Callable[[CudaHelper], Any]], Any]

pytestmark = pytest.mark.root
MIB = 1 << 20
PIECES = 6  # blocks of 2 MiB, each copied by itself
WORKER = 10 * MIB  # what the arena's worker has of a GPU: a context, and room for hashes
CONTEXT = 8 * MIB


@pytest.fixture
def program(start_holder: Callable[..., Holder]) -> Holder:
    return start_holder(PIECES, allocations=PIECES)


def keepers(program: Holder, worker: psutil.Process) -> list[psutil.Process]:
    """Return the holders that have descriptors of VRAM, as the worker has."""
    (helper,) = [parent for parent in worker.parents() if "kybernate_shim.cuda_helper.helper" in parent.cmdline()]
    socket = helper.cmdline()[helper.cmdline().index("--socket") + 1]
    folder = str(Path(socket).parent / "holders")
    ours = [one for one in psutil.process_iter(["cmdline"]) if folder in " ".join(one.info["cmdline"] or [])]
    return [one for one in ours if len(list(Path(f"/proc/{one.pid}/fd").iterdir())) > PIECES]


@asynccontextmanager
async def copying(
    helper: CudaHelper, program: Holder, gpus: Gpus, socket: Path, nth: int, limits: StepSeconds = LIMITS
) -> AsyncIterator[tuple[asyncio.Future[Any], psutil.Process]]:
    """Suspend a program; its `nth` copy waits when the driver has checkpointed it."""
    await helper.warm([program.pid], 20)
    worker = arenas_worker(socket)
    gpus.record()
    gpus.switch(f"{COPY}:{HASHES + nth}:hold@{worker.pid}")
    suspending = asyncio.ensure_future(suspend(helper, lambda: [program.pid], limits, arena=True))
    try:
        await until(lambda: suspending.done() or "checkpoint" in [call.name for call in gpus.calls()])
        assert not suspending.done()
        async with asyncio.timeout(20):
            while await state_of(helper, program) is not State.CHECKPOINTED:  # noqa: ASYNC110  # of another process
                await asyncio.sleep(0.01)
        yield suspending, worker
    finally:
        gpus.switch("")
        await asyncio.wait({suspending})


async def state_of(helper: CudaHelper, program: Holder) -> State:
    return (await helper.states([program.pid])).processes[program.pid].state


async def back(helper: CudaHelper, program: Holder) -> None:
    await resume(helper, [program.pid], limits=LIMITS)


def states_of(program: Holder) -> set[BlockState]:
    page = control_of(program.pid)
    assert page is not None
    with page:
        return {block.state for block in page.blocks()}


def pending(memory: Memory, program: Holder) -> int:
    return sum(one.size for one in memory.record(ArenaOwner.of(program.pid)).pending)


@pytest.mark.parametrize("nth", [1, PIECES])
def test_driver_checkpoints_while_copies_continue(
    use_arena: Run, program: Holder, gpus: Gpus, socket: Path, memory: Memory, nth: int
) -> None:
    async def body(helper: CudaHelper) -> None:
        for _ in range(2):
            async with copying(helper, program, gpus, socket, nth) as (suspending, _):
                assert states_of(program) == {BlockState.AWAY}
                assert pending(memory, program) > 0
                gpus.switch("")
                await suspending
                assert pending(memory, program) == 0
                assert gpus.used()[0] == WORKER
            await back(helper, program)
            assert program.is_right()
            for piece in range(PIECES):
                program.fill(piece, piece + 100)

    use_arena(body)


@pytest.mark.parametrize("nth", [1, 4])
def test_copies_of_a_worker_that_dies_are_finished(
    use_arena: Run, program: Holder, gpus: Gpus, socket: Path, memory: Memory, nth: int
) -> None:
    async def body(helper: CudaHelper) -> None:
        async with copying(helper, program, gpus, socket, nth) as (suspending, worker):
            worker.kill()
            await suspending
            assert pending(memory, program) == 0
            assert gpus.used()[0] == CONTEXT  # the other worker's, which has hashed nothing
        await back(helper, program)

    use_arena(body)
    assert program.is_right()


def test_copies_of_a_helper_that_dies_are_finished_by_the_next_one(
    use_arena: Run, program: Holder, gpus: Gpus, socket: Path, memory: Memory
) -> None:
    async def interrupted(helper: CudaHelper) -> None:
        async with copying(helper, program, gpus, socket, 3) as (suspending, _):
            kill_helper(socket)
            with pytest.raises(CudaError):
                await suspending

    use_arena(interrupted)
    assert states_of(program) == {BlockState.AWAY}

    async def resumed(helper: CudaHelper) -> None:
        await back(helper, program)

    use_arena(resumed)
    assert program.is_right()


def test_keeper_that_dies_costs_nothing_while_the_worker_lives(
    use_arena: Run, program: Holder, gpus: Gpus, socket: Path
) -> None:
    async def body(helper: CudaHelper) -> None:
        async with copying(helper, program, gpus, socket, 2) as (suspending, worker):
            found = keepers(program, worker)
            assert len(found) == 1
            kill(found)
            gpus.switch("")
            await suspending
        await back(helper, program)

    use_arena(body)
    assert program.is_right()


def test_program_stays_locked_where_its_memory_is_lost(
    use_arena: Run, program: Holder, gpus: Gpus, socket: Path
) -> None:
    """Worker and keeper die together, as by the kernel's choice when memory is short: what was not copied is gone."""

    async def body(helper: CudaHelper) -> None:
        async with copying(helper, program, gpus, socket, 2) as (suspending, worker):
            found = keepers(program, worker)
            assert len(found) == 1
            kill([*found, worker])
            with pytest.raises(CudaError, match="stays locked"):
                await suspending
            with pytest.raises(CudaError, match="stays locked"):
                await back(helper, program)
            assert await state_of(helper, program) is not State.RUNNING

    use_arena(body)


def test_program_that_ends_meanwhile_leaves_nothing(
    use_arena: Run, program: Holder, gpus: Gpus, socket: Path, memory: Memory
) -> None:
    async def body(helper: CudaHelper) -> None:
        async with copying(helper, program, gpus, socket, 2) as (suspending, worker):
            psutil.Process(program.pid).send_signal(signal.SIGKILL)
            gpus.switch("")
            with suppress(CudaError):  # the driver has checkpointed it before
                await suspending
            await until(lambda: gpus.used()[0] == WORKER)
            await until(lambda: not keepers(program, worker))
            await until(lambda: memory.free() == memory.size)

    use_arena(body)
