"""Programs that ask all the time whether the GPU's work is done, which the driver answers without its lock.

The real driver reads the GPU's semaphores for that, also when it has taken them out of a process that it checkpointed.
"""

# ruff: noqa: F811  # fixtures that are imported, and are arguments of tests
from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from kybernate_shim.address import answers
from kybernate_shim.gpu.errors import CudaError
from kybernate_shim.gpu.helper_answers import State
from kybernate_shim.gpu.helper_client import CudaHelper, log_path
from kybernate_shim.gpu.sequence import resume, suspend
from kybernate_shim.linux.process_memory import read_maps
from kybernate_shim.linux.ptrace.seized import SeizedProcess
from tests.contract.cuda_driver.arena_moves import SLOW, Run, back, out, until, use  # noqa: F401  # a fixture
from tests.contract.cuda_driver.cycles import LIMITS
from tests.contract.cuda_driver.helper_processes import PATIENCE, helpers, kill_helpers
from tests.fakes.cuda import Gpus
from tests.fakes.cuda.build import SOURCES
from tests.fakes.cuda.programs import Program

pytestmark = pytest.mark.root
Start = Callable[..., Program]
POLLS = {"COMPUTES_POLLS": "20"}
HEAP_CYCLES = 6
HELPER = "kybernate_shim.cuda_helper.helper"
NEVER_COVERS = """
import asyncio, sys
from kybernate_shim.cuda_helper import helper, holders
holders.Uncovered.cover = lambda *_: asyncio.Event().wait()
sys.exit(helper.main(["--socket", sys.argv[1]]))
"""
CHECKPOINTED = '"event": "cuda.checkpointed"'


def state_of_main_thread(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_program_that_polls_is_suspended_and_resumed(use: Run, start: Start, gpus: Gpus) -> None:
    programs = [start(device=index, variables=POLLS) for index in (0, 1)]

    async def body(helper: CudaHelper) -> None:
        for _ in range(10):
            suspended = await suspend(helper, lambda: [one.pid for one in programs], LIMITS)
            assert gpus.used() == [0, 0]
            for program in programs:
                program.stands_still(0.02)
            await resume(helper, suspended.pids, limits=LIMITS)
            for program in programs:
                program.wait_for_steps(1)

    use(body)


def test_program_that_polls_is_suspended_through_the_arena(use: Run, start: Start, preload: Path) -> None:
    program = start(variables=POLLS, preload=preload)

    async def body(helper: CudaHelper) -> None:
        for _ in range(5):
            assert not (await out(helper, program)).taken.reasons
            program.stands_still(0.02)
            await back(helper, program)
            program.wait_for_steps(1)

    use(body)


def test_covers_are_gone_after_a_resume(use: Run, start: Start) -> None:
    program = start(variables=POLLS)

    async def body(helper: CudaHelper) -> None:
        await suspend(helper, lambda: [program.pid], LIMITS)
        await resume(helper, [program.pid], limits=LIMITS)
        once = len(read_maps(program.pid))
        for _ in range(5):
            await suspend(helper, lambda: [program.pid], LIMITS)
            await resume(helper, [program.pid], limits=LIMITS)
        assert len(read_maps(program.pid)) == once

    use(body)


@pytest.mark.parametrize("share", ["0.5", "0.95"])
def test_threads_that_have_what_the_driver_waits_for_continue(
    use: Run, gpus: Gpus, libraries: Path, share: str
) -> None:
    """A thread may be stopped where it has the lock of the heap. The driver needs that, too, for its checkpoint."""
    environment = (
        dict(os.environ) | gpus.environment(libraries) | {"MALLOC_ARENA_MAX": "1", "HEAP_USES": "30", "HELD": share}
    )
    program = Program([sys.executable, SOURCES / "trims.py", "4", "1"], environment)

    async def body(helper: CudaHelper) -> None:
        program.wait_for_steps(1)
        for _ in range(HEAP_CYCLES):
            await suspend(helper, lambda: [program.pid], LIMITS)
            await resume(helper, [program.pid], limits=LIMITS)
            program.computes_on()

    try:
        use(body)
    finally:
        program.kill()


@pytest.mark.parametrize("how", ["999", "hang", "hang-after", "crash"])
def test_program_that_polls_survives_a_checkpoint_that_fails(use: Run, start: Start, gpus: Gpus, how: str) -> None:
    """The driver may take its mappings away when the call has been given up long since."""
    program = start(variables=POLLS)
    limits = replace(LIMITS, checkpoint=1, settle=PATIENCE)

    async def body(helper: CudaHelper) -> None:
        for _ in range(3):
            gpus.switch(f"checkpoint:1:{how}@{program.pid}")
            with pytest.raises(CudaError):
                await suspend(helper, lambda: [program.pid], limits)
            gpus.switch("")
            program.wait_for_steps(1)
        await suspend(helper, lambda: [program.pid], LIMITS)
        await resume(helper, [program.pid], limits=LIMITS)
        program.wait_for_steps(1)

    use(body)


def test_program_that_polls_survives_a_checkpoint_that_is_cancelled(use: Run, start: Start, gpus: Gpus) -> None:
    program = start(variables=POLLS)
    gpus.slow(SLOW)

    async def body(helper: CudaHelper) -> None:
        for _ in range(3):
            leaving = asyncio.create_task(suspend(helper, lambda: [program.pid], LIMITS))
            await until(lambda: state_of_main_thread(program.pid) == "t")
            leaving.cancel()
            await asyncio.wait([leaving])
            assert leaving.cancelled()
            program.wait_for_steps(1)

    use(body)


def test_process_that_a_debugger_has_is_suspended_all_the_same(use: Run, start: Start) -> None:
    program = start(pause_ms=1000)
    program.wait_for_steps(1)  # it pauses now, and is not in the driver's hands

    async def body(helper: CudaHelper) -> None:
        with SeizedProcess(program.pid):
            await helper.lock([program.pid], 5)
            await helper.checkpoint([program.pid], 5)
        states = (await helper.states([program.pid])).processes
        assert states[program.pid].state is State.CHECKPOINTED
        await resume(helper, [program.pid], limits=LIMITS)
        program.wait_for_steps(1)

    use(body)


def test_helper_that_is_killed_leaves_no_thread_stopped(use: Run, start: Start, gpus: Gpus, socket: Path) -> None:
    program = start()
    gpus.switch(f"checkpoint:1:hang@{program.pid}")

    async def body(helper: CudaHelper) -> None:
        await helper.lock([program.pid], PATIENCE)
        asking = asyncio.create_task(helper.checkpoint([program.pid], PATIENCE))
        await until(lambda: state_of_main_thread(program.pid) == "t")
        kill_helpers(socket)
        await asyncio.wait([asking])
        await until(lambda: state_of_main_thread(program.pid) != "t")

    use(body)


def test_program_that_polls_survives_the_helpers_death(use: Run, start: Start, gpus: Gpus, socket: Path) -> None:
    """The driver still makes its checkpoint. The threads stay stopped, and the next helper has it covered."""
    program = start(variables=POLLS)
    gpus.slow(SLOW)

    async def suspended(helper: CudaHelper) -> None:
        await helper.lock([program.pid], PATIENCE)
        gpus.record()
        asking = asyncio.create_task(helper.checkpoint([program.pid], PATIENCE))
        await until(lambda: "checkpoint" in [call.name for call in gpus.calls()])
        assert state_of_main_thread(program.pid) == "t"
        (process,) = helpers(socket)
        process.kill()
        await asyncio.wait([asking])

    async def resumed(helper: CudaHelper) -> None:
        await until(lambda: gpus.used() == [0, 0])
        program.stands_still()
        assert (await helper.states([program.pid])).processes[program.pid].state is State.CHECKPOINTED
        await resume(helper, [program.pid], limits=LIMITS)
        program.wait_for_steps(1)

    for _ in range(3):
        use(suspended)
        socket.unlink(missing_ok=True)
        use(resumed)


@pytest.fixture
def never_covers(gpus: Gpus, socket: Path) -> psutil.Popen:
    """A helper that stops threads for the driver, and never gets to cover what that has taken away."""
    socket.parent.mkdir(exist_ok=True)
    with log_path(socket).open("wb") as log:
        helper = psutil.Popen([sys.executable, "-c", NEVER_COVERS, socket, HELPER], stdout=log, stderr=log)
    while not answers(socket):
        assert helper.poll() is None, log_path(socket).read_text()
        time.sleep(0.01)
    return helper


def test_program_that_polls_survives_the_helpers_death_after_the_drivers_call(
    use: Run, start: Start, socket: Path, never_covers: psutil.Popen
) -> None:
    """The driver has taken memory away, and the helper has not had it covered: the next one does."""
    program = start(variables={"COMPUTES_POLLS": "usr1"})

    async def suspended(helper: CudaHelper) -> None:
        await helper.lock([program.pid], PATIENCE)
        asking = asyncio.create_task(helper.checkpoint([program.pid], PATIENCE))
        await until(lambda: CHECKPOINTED in log_path(socket).read_text())
        never_covers.kill()
        never_covers.wait()
        await asyncio.wait([asking])
        assert state_of_main_thread(program.pid) == "t"

    async def resumed(helper: CudaHelper) -> None:
        await helper.states([program.pid])  # which starts it
        await until(lambda: state_of_main_thread(program.pid) != "t")
        program.signal(signal.SIGUSR1)
        program.stands_still()
        await resume(helper, [program.pid], limits=LIMITS)
        program.wait_for_steps(1)

    use(suspended)
    socket.unlink(missing_ok=True)
    use(resumed)
