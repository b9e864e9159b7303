"""Programs with the preload library: their memory goes into the arena and comes back, whatever fails on the way."""

# ruff: noqa: F811  # fixtures that are imported, and are arguments of tests
from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from kybernate_shim.arena.control import Verb, control_of
from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.gpu.errors import GpuPair
from kybernate_shim.gpu.helper_answers import State
from kybernate_shim.gpu.helper_client import CudaHelper, log_path
from kybernate_shim.gpu.sequence import StepSeconds, resume
from tests.contract.cuda_driver.arena_moves import (  # noqa: F401  # fixtures
    CONTEXT,
    MIB,
    SIZE,
    SLOW,
    WORKER,
    Run,
    Start,
    back,
    in_arena,
    out,
    program,
    state_of,
    until,
    use,
)
from tests.contract.cuda_driver.cycles import LIMITS, cycle
from tests.contract.cuda_driver.helper_processes import kill_helper
from tests.fakes.cuda import Gpus
from tests.fakes.cuda.programs import Program

pytestmark = pytest.mark.root


def test_memory_goes_through_the_arena_and_comes_back(use: Run, program: Program, gpus: Gpus, memory: Memory) -> None:
    async def body(helper: CudaHelper) -> None:
        for _ in range(20):
            suspended = await out(helper, program)
            assert [step.name for step in suspended.steps] == ["cuda-lock", "arena-take", "cuda-checkpoint"]
            assert in_arena(memory, program) == 8 * MIB
            assert gpus.used()[0] == WORKER
            assert await state_of(helper, program) is State.CHECKPOINTED
            steps = await back(helper, program)
            assert [step.name for step in steps] == ["cuda-restore", "arena-give", "cuda-unlock"]
            assert in_arena(memory, program) == 0
            program.wait_for_steps(1)

    use(body)
    program.computes_on()


def test_memory_in_the_arena_comes_back_on_another_gpu(use: Run, program: Program, gpus: Gpus) -> None:
    first, second = gpus.uuids
    exchange = [GpuPair(first, second), GpuPair(second, first)]

    async def body(helper: CudaHelper) -> None:
        await out(helper, program)
        await resume(helper, [program.pid], exchange, LIMITS)
        assert gpus.used() == [WORKER, 2 * CONTEXT + 8 * MIB]  # the worker's, which has hashed nothing there
        program.wait_for_steps(1)
        await out(helper, program)
        await back(helper, program)  # where it is now
        assert gpus.used() == [WORKER, WORKER + CONTEXT + 8 * MIB]

    use(body)
    program.computes_on()


def test_program_stands_still_between_take_and_give(use: Run, program: Program) -> None:
    async def body(helper: CudaHelper) -> None:
        await out(helper, program)
        await asyncio.to_thread(program.stands_still)
        await back(helper, program)

    use(body)
    program.computes_on()


def test_several_programs_on_two_gpus(use: Run, start: Start, preload: Path, memory: Memory) -> None:
    programs = [start(mib=8, device=index % 2, preload=preload) for index in range(3)]
    programs.append(start(mib=4))  # one without the library goes the driver's way

    async def body(helper: CudaHelper) -> None:
        for _ in range(5):
            await out(helper, *programs)
            assert [in_arena(memory, program) for program in programs] == [8 * MIB] * 3 + [0]
            await back(helper, *programs)

    use(body)
    for one in programs:
        one.computes_on()


def test_one_leaves_while_another_comes(use: Run, start: Start, preload: Path, gpus: Gpus) -> None:
    programs = [start(mib=8, preload=preload) for _ in range(2)]

    async def body(helper: CudaHelper) -> None:
        for leaving, coming in (programs, programs[::-1]):
            await out(helper, coming)
            gpus.slow(SLOW)  # so that the driver still has to do with the one when the other's bytes come
            await asyncio.gather(out(helper, leaving), back(helper, coming))
            coming.wait_for_steps(1)
            gpus.slow(0)
            await back(helper, leaving)

    use(body)
    for one in programs:
        one.computes_on()


def test_what_does_not_fit_goes_the_drivers_way_and_says_so(
    use: Run, start: Start, preload: Path, memory: Memory, gpus: Gpus
) -> None:
    large, small = start(mib=SIZE // MIB + 2, preload=preload), start(mib=8, preload=preload)

    async def body(helper: CudaHelper) -> None:
        suspended = await out(helper, large, small)
        assert "do not fit into the arena" in suspended.taken.reasons[large.pid]
        assert in_arena(memory, large) == 0
        assert in_arena(memory, small) == 8 * MIB
        assert await state_of(helper, large) is State.CHECKPOINTED
        await back(helper, large, small)

    use(body)
    large.computes_on()
    small.computes_on()


def test_room_of_a_process_that_ends_while_it_is_away_is_free_again(use: Run, program: Program, memory: Memory) -> None:
    async def body(helper: CudaHelper) -> None:
        await out(helper, program)
        assert memory.free() == SIZE - 8 * MIB
        owner = ArenaOwner.of(program.pid)
        program.signal(signal.SIGKILL)
        await until(lambda: not owner.alive)
        assert memory.free() == SIZE

    use(body)


def test_unlock_gives_back_what_is_away(use: Run, program: Program, memory: Memory) -> None:
    async def body(helper: CudaHelper) -> None:
        await out(helper, program)
        await helper.restore([program.pid], 10)
        await helper.unlock([program.pid], 10)
        assert in_arena(memory, program) == 0

    use(body)
    program.computes_on()


@pytest.mark.parametrize("verb", ["lock", "unlock", "checkpoint"])
@pytest.mark.parametrize("nth", [1, 2])
def test_verb_that_fails_around_the_move_leaves_the_program_computing(
    use: Run, program: Program, gpus: Gpus, memory: Memory, verb: str, nth: int
) -> None:
    gpus.switch(f"{verb}:{nth}:999@{program.pid}")

    async def body(helper: CudaHelper) -> None:
        await cycle(helper, program.pid)
        assert in_arena(memory, program) == 0

    use(body)
    program.computes_on()


@pytest.mark.parametrize("nth", range(1, 15))
def test_call_of_the_arenas_driver_that_fails_costs_nothing(
    use: Run, start: Start, preload: Path, gpus: Gpus, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """The n-th virtual memory call of the worker, or of the program, fails once, wherever in a cycle that is."""
    program = start(mib=8, preload=preload, switches=f"vmm:{nth + 5}:2")  # its first ones made its memory
    monkeypatch.setenv("FAKE_CUDA_FAIL", f"vmm:{nth}:1")

    async def body(helper: CudaHelper) -> None:
        for _ in range(2):
            await cycle(helper, program.pid)

    use(body)
    program.computes_on()


@pytest.mark.parametrize("how", ["crash", "hang"])
@pytest.mark.parametrize("nth", [3, 8, 14, 20])
def test_worker_that_dies_in_a_move_is_replaced(
    use: Run, program: Program, gpus: Gpus, monkeypatch: pytest.MonkeyPatch, socket: Path, how: str, nth: int
) -> None:
    monkeypatch.setenv("FAKE_CUDA_FAIL", f"vmm:{nth}:{how}")
    hasty = StepSeconds(lock=5, checkpoint=2, restore=2, unlock=10, settle=10)

    async def body(helper: CudaHelper) -> None:
        await cycle(helper, program.pid, hasty)

    use(body)
    program.computes_on()


def test_bytes_outlive_the_helper(use: Run, program: Program, socket: Path, memory: Memory) -> None:
    async def away(helper: CudaHelper) -> None:
        await out(helper, program)

    use(away)
    kill_helper(socket)
    assert in_arena(memory, program) == 8 * MIB

    async def return_(helper: CudaHelper) -> None:
        await back(helper, program)

    use(return_)
    program.computes_on()


def test_library_answers_from_the_start(program: Program) -> None:
    control = control_of(program.pid)
    assert control is not None
    with control:
        assert sum(block.size for block in control.blocks()) == 8 * MIB
        control.ask(Verb.PROBE, seconds=5)
    program.computes_on()


def test_log_tells_moves(use: Run, program: Program, socket: Path) -> None:
    async def body(helper: CudaHelper) -> None:
        await out(helper, program)
        await back(helper, program)

    use(body)
    log = log_path(socket).read_text()
    assert '"event": "arena.offloaded"' in log
    assert '"event": "arena.settled"' in log
