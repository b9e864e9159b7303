"""Bytes of the arena are on the GPU before their program is; whatever becomes of that, the program has its own."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from kybernate_shim.gpu.errors import CudaError, GpuPair
from kybernate_shim.gpu.helper_answers import RoomComing
from kybernate_shim.gpu.helper_client import CudaHelper, log_path
from kybernate_shim.gpu.sequence import Ahead, StepSeconds, resume, suspend
from tests.contract.cuda_driver.cycles import LIMITS
from tests.contract.cuda_driver.helper_processes import PATIENCE, helpers
from tests.fakes.actor import eventually
from tests.fakes.cuda import Gpus
from tests.fakes.cuda.programs import Holder, Program

Start = Callable[..., Program]
Run = Callable[[Callable[[CudaHelper], Any]], Any]

pytestmark = pytest.mark.root
MIB = 1 << 20
CONTEXT = 8 * MIB
SIZE = 24 * MIB
PLACEHOLDERS = (20 + 2) * MIB  # what stands in for so much
ROOM = 128 * MIB  # for all that a test has on a GPU
GPU = 1024 * MIB
WORKER = 10 * MIB  # what the arena's worker has of a GPU: a context, and room for hashes
SLOW = 60  # seconds for a GiB: the driver takes half a second for a context


@pytest.fixture
def program(start: Start, preload: Path) -> Program:
    return start(mib=SIZE // MIB, preload=preload)


async def away(helper: CudaHelper, gpus: Gpus, *programs: Program) -> None:
    """Suspend, and have everything slow from then on."""
    await suspend(helper, lambda: [program.pid for program in programs], LIMITS, arena=True)
    gpus.slow(SLOW)


async def back(helper: CudaHelper, ahead: Ahead, *pairs: GpuPair) -> None:
    await resume(helper, [ahead.pid], pairs, LIMITS, ahead=[ahead])


def prefetched(socket: Path) -> list[int]:
    """Return how many bytes of each resume had been prefetched.

    A suspend that cannot lock in time settles, too, and begins again; what it settles was never checkpointed.
    """
    found: list[int] = []
    checkpointed = False
    for line in (json.loads(line) for line in log_path(socket).read_text().splitlines() if line.startswith("{")):
        match line["event"]:
            case "arena.offloaded":
                checkpointed = False
            case "cuda.checkpointed":
                checkpointed = True
            case "arena.settled" if checkpointed:
                found.append(line["prefetched_bytes"])
    return found


def test_what_is_there_before_the_program_is_not_copied_again(
    use_arena: Run, program: Program, gpus: Gpus, socket: Path
) -> None:
    async def body(helper: CudaHelper) -> None:
        for _ in range(3):
            await away(helper, gpus, program)
            await back(helper, Ahead(program.pid, gpus.uuids[0], ROOM))
            assert gpus.used()[0] == WORKER + CONTEXT + SIZE
            await asyncio.to_thread(program.computes_on)

    use_arena(body)
    assert prefetched(socket) == [SIZE] * 3


def test_what_has_to_stay_free_does(use_arena: Run, program: Program, gpus: Gpus, socket: Path) -> None:
    async def body(helper: CudaHelper) -> None:
        for spare in (8 * MIB, -MIB):
            await away(helper, gpus, program)
            free = GPU - gpus.used()[0] - spare
            coming = asyncio.create_task(back(helper, Ahead(program.pid, gpus.uuids[0], free)))
            while not coming.done():
                assert gpus.used()[0] <= WORKER + CONTEXT + SIZE
                await asyncio.sleep(0.01)
            await coming

    use_arena(body)
    program.computes_on()
    assert prefetched(socket) == [0, 0]  # all that is wanted is more than it may be


@pytest.mark.parametrize("arena_bytes", [1000 * MIB])
def test_prefetched_memory_gives_way_to_the_programs_where_there_is_no_room_for_both(
    use_arena: Run, start_holder: Callable[..., Holder], gpus: Gpus, socket: Path
) -> None:
    """Another program leaves as much room as this one needs in the end."""
    size, gpu = 900 * MIB, gpus.uuids[0]
    holder = start_holder(pieces := size // (2 * MIB), allocations=90, zeros=True)
    for piece in range(pieces):
        holder.fill(piece, piece % 251 + 1)  # a value is a byte

    async def body(helper: CudaHelper) -> None:
        await suspend(helper, lambda: [holder.pid], LIMITS, arena=True)
        gpus.slow(3)
        ahead = Ahead(holder.pid, gpu, CONTEXT + 92 * MIB, room_comes=True)
        with gpus.occupied(0, leaving=CONTEXT + size + 4 * MIB):
            coming = RoomComing(gpu, LIMITS.restore)
            await resume(helper, [holder.pid], limits=LIMITS, coming=coming, ahead=[ahead])
            assert await asyncio.to_thread(holder.is_right)

    use_arena(body)
    assert prefetched(socket)[0] > 0
    assert gpus.used()[0] == WORKER + CONTEXT + size


def test_program_moves_to_the_gpu_that_its_bytes_went_to(
    use_arena: Run, program: Program, gpus: Gpus, socket: Path
) -> None:
    first, second = gpus.uuids

    async def body(helper: CudaHelper) -> None:
        await away(helper, gpus, program)
        await back(helper, Ahead(program.pid, second, ROOM), GpuPair(first, second), GpuPair(second, first))

    use_arena(body)
    program.computes_on()
    assert prefetched(socket) == [SIZE]
    assert gpus.used() == [WORKER, 2 * CONTEXT + SIZE]


@pytest.mark.parametrize("gpu", [1, "nobody's"])
def test_bytes_on_a_wrong_gpu_are_of_no_use_and_no_harm(
    use_arena: Run, program: Program, gpus: Gpus, gpu: int | str
) -> None:
    async def body(helper: CudaHelper) -> None:
        await away(helper, gpus, program)
        await back(helper, Ahead(program.pid, gpus.uuids[gpu] if isinstance(gpu, int) else gpu, ROOM))

    use_arena(body)
    program.computes_on()
    assert gpus.used() == [WORKER + CONTEXT + SIZE, CONTEXT if gpu == 1 else 0]


def test_copies_that_take_the_programs_own_room_are_given_up(
    use_arena: Run, start: Start, program: Program, gpus: Gpus, socket: Path
) -> None:
    """Another program comes, after which there is room for the copies or for the program, and not for both."""

    async def body(helper: CudaHelper) -> None:
        await away(helper, gpus, program)
        await helper.restore([program.pid], PATIENCE)
        restored = gpus.used()[0]
        await helper.prefetch(program.pid, gpus.uuids[0], 0, PATIENCE)
        assert await asyncio.to_thread(eventually, lambda: gpus.used()[0] == restored + SIZE)
        free = GPU - gpus.used()[0]
        other = await asyncio.to_thread(start, mib=(free - CONTEXT) // MIB - 1)
        await helper.reload([program.pid], PATIENCE)
        await helper.unlock([program.pid], PATIENCE)
        await asyncio.to_thread(other.computes_on)

    use_arena(body)
    program.computes_on()
    assert prefetched(socket) == [0]


def test_restore_that_fails_gives_the_memory_back(use_arena: Run, program: Program, gpus: Gpus) -> None:
    async def body(helper: CudaHelper) -> None:
        await away(helper, gpus, program)
        gpus.switch(f"restore:1:hang@{program.pid}")
        hasty = StepSeconds(lock=PATIENCE, checkpoint=PATIENCE, restore=2, unlock=PATIENCE, settle=5)
        with pytest.raises(CudaError):
            await resume(helper, [program.pid], limits=hasty, ahead=[Ahead(program.pid, gpus.uuids[0], ROOM)])
        assert gpus.used() == [WORKER, 0]
        await back(helper, Ahead(program.pid, gpus.uuids[0], ROOM))

    use_arena(body)
    program.computes_on()


def test_checkpoint_instead_of_a_give_returns_the_memory(use_arena: Run, program: Program, gpus: Gpus) -> None:
    async def body(helper: CudaHelper) -> None:
        await away(helper, gpus, program)
        await helper.prefetch(program.pid, gpus.uuids[0], ROOM, PATIENCE)
        await helper.restore([program.pid], PATIENCE)
        assert gpus.used() == [WORKER + SIZE + CONTEXT + PLACEHOLDERS, 0]  # of the program what it needs at least
        await helper.checkpoint([program.pid], PATIENCE)
        assert gpus.used() == [WORKER, 0]
        await resume(helper, [program.pid], limits=LIMITS)

    use_arena(body)
    program.computes_on()


def test_worker_that_is_killed_meanwhile_is_replaced(
    use_arena: Run, program: Program, gpus: Gpus, socket: Path
) -> None:
    async def body(helper: CudaHelper) -> None:
        await away(helper, gpus, program)
        coming = asyncio.create_task(back(helper, Ahead(program.pid, gpus.uuids[0], ROOM)))
        while gpus.used()[0] < WORKER + SIZE:  # noqa: ASYNC110  # of another process
            await asyncio.sleep(0.01)
        arenas_worker(socket).send_signal(signal.SIGKILL)
        await coming

    use_arena(body)
    program.computes_on()


def arenas_worker(socket: Path) -> psutil.Process:
    (helper,) = helpers(socket)
    children = psutil.process_iter(["ppid", "cmdline"])  # knows nothing of one that ends meanwhile
    (worker,) = (it for it in children if it.info["ppid"] == helper.pid and "arena" in (it.info["cmdline"] or []))
    return worker


@pytest.mark.parametrize("nth", range(4, 9))
def test_call_that_fails_for_the_copies_costs_nothing(
    use_arena: Run, program: Program, gpus: Gpus, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """The n-th virtual memory call of the worker fails once: those of what follows the copies."""
    monkeypatch.setenv("FAKE_CUDA_FAIL", f"vmm:{nth}:1")

    async def body(helper: CudaHelper) -> None:
        await away(helper, gpus, program)
        try:
            await back(helper, Ahead(program.pid, gpus.uuids[0], ROOM))
        except CudaError:
            await back(helper, Ahead(program.pid, gpus.uuids[0], ROOM))

    use_arena(body)
    program.computes_on()


def test_several_programs_on_one_gpu(use_arena: Run, start: Start, preload: Path, gpus: Gpus, socket: Path) -> None:
    programs = [start(mib=8, preload=preload) for _ in range(3)]

    async def body(helper: CudaHelper) -> None:
        await away(helper, gpus, *programs)
        ahead = [Ahead(program.pid, gpus.uuids[0], ROOM) for program in programs]
        await resume(helper, [one.pid for one in ahead], limits=LIMITS, ahead=ahead)

    use_arena(body)
    for program in programs:
        program.computes_on()
    assert prefetched(socket) == [8 * MIB] * 3
    assert gpus.used()[0] == WORKER + 3 * (CONTEXT + 8 * MIB)
