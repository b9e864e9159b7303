"""Suspend and resume as a whole: after every failure, at every step, the programs compute on with the right numbers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.gpu.errors import CudaCallFailed, CudaError, GpuPair, cuda_memory_imported
from kybernate_shim.gpu.helper_answers import State
from kybernate_shim.gpu.helper_client import CudaHelper
from kybernate_shim.gpu.sequence import StepSeconds, bring_back, resume, suspend
from tests.contract.cuda_driver.helper_processes import PATIENCE, called, helpers
from tests.fakes.cuda import Gpus
from tests.fakes.cuda.programs import Program

Start = Callable[..., Program]
Run = Callable[[Callable[[CudaHelper], Any]], Any]

pytestmark = pytest.mark.root
LIMITS = StepSeconds(lock=PATIENCE, checkpoint=PATIENCE, restore=PATIENCE, unlock=PATIENCE)
WAYS = ["999", "hang", "hang-after", "crash"]


@pytest.fixture
def programs(start: Start) -> list[Program]:
    return [start(device=index % 2) for index in range(3)]


def hasty(verb: str) -> StepSeconds:
    """Have only `verb` given up soon: what is not meant to hang may take its time on a busy machine."""
    return replace(LIMITS, settle=5, **{"lock" if verb == "state" else verb: 2})


def pids_of(programs: list[Program]) -> list[int]:
    return [program.pid for program in programs]


def everything_in(error: BaseException) -> str:
    """Return an error's message and its notes: of calls on several processes, and of the undo."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


async def states_of(helper: CudaHelper, programs: list[Program]) -> set[State]:
    return {it.state for it in (await helper.states(pids_of(programs))).processes.values()}


def test_suspend_frees_the_gpus_and_resume_goes_on_fifty_times(use: Run, programs: list[Program], gpus: Gpus) -> None:
    async def body(helper: CudaHelper) -> None:
        for _ in range(50):
            suspended = await suspend(helper, lambda: pids_of(programs), LIMITS)
            assert sorted(suspended.pids) == sorted(pids_of(programs))
            assert [step.name for step in suspended.steps] == ["cuda-lock", "cuda-checkpoint"]
            assert gpus.used() == [0, 0]
            steps = await resume(helper, suspended.pids, limits=LIMITS)
            assert [step.name for step in steps] == ["cuda-restore", "cuda-unlock"]
            for program in programs:
                program.wait_for_steps(1)

    use(body)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("verb", ["state", "lock", "checkpoint"])
def test_failed_suspend_leaves_every_program_computing(
    use: Run, programs: list[Program], gpus: Gpus, verb: str, how: str
) -> None:
    gpus.switch(f"{verb}:1:{how}@{programs[1].pid}")

    async def body(helper: CudaHelper) -> None:
        with pytest.raises(CudaError) as caught:
            await suspend(helper, lambda: pids_of(programs), hasty(verb))
        told = everything_in(caught.value)
        assert f"{verb} of process {programs[1].pid}" in told
        assert "not undone" not in told
        assert await states_of(helper, programs) == {State.RUNNING}

    use(body)
    for program in programs:
        program.computes_on()


def test_memory_imported_before_the_lock_is_noticed_under_it(use: Run, programs: list[Program], gpus: Gpus) -> None:
    asked = []

    def last_look(pids: Sequence[int]) -> None:
        asked.append(sorted(pids))
        raise cuda_memory_imported(pids[0])

    async def body(helper: CudaHelper) -> None:
        with pytest.raises(CudaError, match="imported memory of another process while the container was being locke"):
            await suspend(helper, lambda: pids_of(programs), LIMITS, last_look=last_look)
        assert await states_of(helper, programs) == {State.RUNNING}

    use(body)
    assert asked == [sorted(pids_of(programs))]
    for program in programs:
        program.computes_on()


@pytest.mark.parametrize("how", WAYS)
def test_failed_restore_leaves_every_program_suspended(use: Run, programs: list[Program], gpus: Gpus, how: str) -> None:
    async def body(helper: CudaHelper) -> None:
        suspended = await suspend(helper, lambda: pids_of(programs), LIMITS)
        gpus.switch(f"restore:1:{how}@{programs[1].pid}")
        with pytest.raises(CudaError) as caught:
            await resume(helper, suspended.pids, limits=hasty("restore"))
        assert f"restore of process {programs[1].pid}" in everything_in(caught.value)
        assert await states_of(helper, programs) == {State.CHECKPOINTED}
        assert gpus.used() == [0, 0]
        await resume(helper, suspended.pids, limits=LIMITS)

    use(body)
    for program in programs:
        program.computes_on()


@pytest.mark.parametrize("how", WAYS)
def test_failed_unlock_is_tried_again(use: Run, programs: list[Program], gpus: Gpus, how: str) -> None:
    async def body(helper: CudaHelper) -> None:
        suspended = await suspend(helper, lambda: pids_of(programs), LIMITS)
        gpus.switch(f"unlock:1:{how}@{programs[1].pid}")
        with pytest.raises(CudaError) as caught:
            await resume(helper, suspended.pids, limits=hasty("unlock"))
        assert f"unlock of process {programs[1].pid}" in everything_in(caught.value)
        assert "not undone" not in everything_in(caught.value)

    use(body)
    for program in programs:
        program.computes_on()


def test_what_cannot_be_undone_is_told(use: Run, programs: list[Program], gpus: Gpus) -> None:
    lost = programs[1]
    gpus.switch(f"checkpoint:1:hang-after@{lost.pid},restore:*:801@{lost.pid}")

    async def body(helper: CudaHelper) -> None:
        with pytest.raises(CudaError, match=f"checkpoint of process {lost.pid}") as caught:
            await suspend(helper, lambda: pids_of(programs), hasty("checkpoint"))
        notes = "\n".join(caught.value.__notes__)
        assert f"not undone: process {lost.pid} is checkpointed" in notes
        assert "CUDA_ERROR_NOT_SUPPORTED" in notes

    use(body)
    for program in programs:
        if program is not lost:
            program.computes_on()
    lost.stands_still()


def test_process_that_never_answers_again_costs_the_others_nothing(
    use: Run, programs: list[Program], gpus: Gpus
) -> None:
    stuck = programs[1]
    gpus.switch(f"checkpoint:1:stuck@{stuck.pid}")

    async def body(helper: CudaHelper) -> None:
        with pytest.raises(CudaCallFailed, match=f"checkpoint of process {stuck.pid} was not answered") as caught:
            await suspend(helper, lambda: pids_of(programs), replace(hasty("checkpoint"), unlock=2))
        assert f"not undone: process {stuck.pid} is unknown" in everything_in(caught.value)

    use(body)
    for program in programs:
        if program is not stuck:
            program.computes_on()


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.2, 0.5])
def test_cancelled_suspend_leaves_every_program_computing(
    use: Run, programs: list[Program], gpus: Gpus, seconds: float
) -> None:
    gpus.slow(60)  # a checkpoint takes 0.6 s

    async def body(helper: CudaHelper) -> None:
        await helper.info()
        task = asyncio.create_task(suspend(helper, lambda: pids_of(programs), LIMITS))
        await asyncio.sleep(seconds)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await states_of(helper, programs) == {State.RUNNING}

    use(body)
    for program in programs:
        program.computes_on()


def test_killed_helper_leaves_every_program_computing(
    use: Run, programs: list[Program], gpus: Gpus, socket: Path
) -> None:
    gpus.slow(60)

    async def body(helper: CudaHelper) -> None:
        await helper.info()
        gpus.record()
        task = asyncio.create_task(suspend(helper, lambda: pids_of(programs), LIMITS))
        await called(gpus, "checkpoint", len(programs))
        helpers(socket)[0].send_signal(signal.SIGKILL)
        with pytest.raises(CudaError, match="the helper ended"):
            await task
        assert await states_of(helper, programs) == {State.RUNNING}

    use(body)
    for program in programs:
        program.computes_on()


def test_process_that_appears_during_the_look_is_caught(use: Run, start: Start, gpus: Gpus) -> None:
    programs = [start()]
    looks: Iterator[None] = iter([None] * 3)

    def list_pids() -> list[int]:
        """Answer like a container in which each look is followed by the start of another process."""
        pids = pids_of(programs)
        if next(looks, "over") is None:
            programs.append(start(device=1))
        return pids

    async def body(helper: CudaHelper) -> None:
        suspended = await suspend(helper, list_pids, LIMITS)
        assert suspended.pids == pids_of(programs)
        assert len(programs) == 4
        assert gpus.used() == [0, 0]
        await resume(helper, suspended.pids, limits=LIMITS)

    use(body)
    for program in programs:
        program.computes_on()


def test_process_that_ends_during_the_lock_is_no_failure(use: Run, start: Start, gpus: Gpus) -> None:
    ending, other = start(busy_ms=2000), start()

    async def body(helper: CudaHelper) -> None:
        gpus.record()
        task = asyncio.create_task(suspend(helper, lambda: [ending.pid, other.pid], LIMITS))
        await called(gpus, "lock", 2)
        ending.signal(signal.SIGKILL)
        suspended = await task
        assert suspended.pids == [other.pid]
        await resume(helper, suspended.pids, limits=LIMITS)

    use(body)
    other.computes_on()


def test_suspended_process_stays_so_when_its_container_is_suspended(use: Run, start: Start) -> None:
    before, other = start(), start()

    async def body(helper: CudaHelper) -> None:
        first = await suspend(helper, lambda: [before.pid], LIMITS)
        second = await suspend(helper, lambda: [before.pid, other.pid], LIMITS)
        assert (first.pids, second.pids) == ([before.pid], [other.pid])
        await resume(helper, second.pids, limits=LIMITS)
        before.stands_still()
        await resume(helper, first.pids, limits=LIMITS)

    use(body)
    before.computes_on()
    other.computes_on()


def test_processes_that_somebody_left_behind_are_brought_back(use: Run, programs: list[Program]) -> None:
    async def body(helper: CudaHelper) -> None:
        pids = pids_of(programs)
        await helper.lock(pids[:2], PATIENCE)
        await helper.checkpoint(pids[:1], PATIENCE)
        assert await bring_back(helper, pids, LIMITS) == []

    use(body)
    for program in programs:
        program.computes_on()


def test_resume_by_a_wrong_map_can_be_repeated_without_one(use: Run, programs: list[Program], gpus: Gpus) -> None:
    async def body(helper: CudaHelper) -> None:
        suspended = await suspend(helper, lambda: pids_of(programs), LIMITS)
        with pytest.raises(CudaCallFailed, match="CUDA_ERROR_INVALID_VALUE"):
            await resume(helper, suspended.pids, [GpuPair(gpus.uuids[0], gpus.uuids[1])], LIMITS)
        await resume(helper, suspended.pids, limits=LIMITS)

    use(body)
    for program in programs:
        program.computes_on()
