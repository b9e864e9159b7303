"""Programs with a thread that polls NVML, whose calls wait while the driver has locked the process.

A thread that waits so has a place in a lock of the driver when that is opened, also where it is stopped.
"""

# ruff: noqa: F811  # fixtures that are imported, and are arguments of tests
from __future__ import annotations

import asyncio
import shutil
import signal
from pathlib import Path

import pytest

from kybernate_shim import native
from kybernate_shim.gpu.helper_answers import State
from kybernate_shim.gpu.helper_client import CudaHelper, log_path
from kybernate_shim.gpu.sequence import resume, suspend
from kybernate_shim.native import PRELOAD
from kybernate_shim.native import build as build_native
from tests.contract.cuda_driver.arena_moves import Run, Start, back, out, state_of, until, use  # noqa: F401  # a fixture
from tests.contract.cuda_driver.cycles import LIMITS
from tests.contract.cuda_driver.helper_processes import PATIENCE, kill_helpers
from tests.fakes.cuda.programs import Program

pytestmark = pytest.mark.root
NVML = {"COMPUTES_NVML": "20"}
CYCLES = 5
ONCE = {"COMPUTES_NVML": "usr1"}
HELD = "arena.threads_kept_stopped"


@pytest.fixture
def blind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a preload library that takes NVML's calls for the program's own, as those of earlier releases do."""
    package = tmp_path / "package"
    shutil.copytree(PRELOAD.of().parent, package / PRELOAD.folder)
    source = package / PRELOAD.folder / "rwlocks.c"
    text = source.read_text()
    source.write_text(text.replace('"libnvidia-"', '"libnothing-"'))
    assert source.read_text() != text
    with monkeypatch.context() as patched:
        patched.setattr(native, "PACKAGE", package)
        return build_native(PRELOAD, tmp_path / "blind")


async def waits_in_nvml(program: Program, helper: CudaHelper) -> None:
    """Suspend a program, and return when its poller waits for the driver."""
    assert not (await out(helper, program)).taken.reasons
    program.signal(signal.SIGUSR1)
    program.stands_still(0.02)


def test_program_that_polls_nvml_is_locked_again(use: Run, start: Start, preload: Path, socket: Path) -> None:
    program = start(mib=8, preload=preload, variables=NVML)

    async def body(helper: CudaHelper) -> None:
        for _ in range(CYCLES):
            assert not (await out(helper, program)).taken.reasons
            program.stands_still(0.02)
            await back(helper, program)
            program.wait_for_steps(1)

    use(body)
    said = log_path(socket).read_text()
    assert HELD not in said
    assert "arena.not_locked_again" not in said


def test_program_that_polls_nvml_goes_by_the_drivers_path(use: Run, start: Start) -> None:
    program = start(variables=NVML)

    async def body(helper: CudaHelper) -> None:
        for _ in range(CYCLES):
            await suspend(helper, lambda: [program.pid], LIMITS)
            await back(helper, program)
            program.wait_for_steps(1)

    use(body)


def test_process_that_the_driver_does_not_lock_again_is_held_by_its_threads(
    use: Run, start: Start, blind: Path, socket: Path
) -> None:
    program = start(mib=8, preload=blind, variables=ONCE)

    async def body(helper: CudaHelper) -> None:
        for _ in range(2):
            await waits_in_nvml(program, helper)
            await helper.restore([program.pid], PATIENCE)
            await helper.reload([program.pid], PATIENCE)
            assert await state_of(helper, program) is State.LOCKED
            program.stands_still()
            await helper.unlock([program.pid], PATIENCE)
            assert await state_of(helper, program) is State.RUNNING
            program.computes_on()

    use(body)
    assert HELD in log_path(socket).read_text()


def test_held_process_does_not_compute_before_its_memory_is_proven(
    use: Run, start: Start, blind: Path, socket: Path
) -> None:
    """As a restore from an image has it, which must not fail for that either."""
    program = start(mib=8, preload=blind, variables=ONCE)

    async def body(helper: CudaHelper) -> None:
        await waits_in_nvml(program, helper)

        taken = asyncio.Event()

        async def proof() -> None:
            await until(lambda: HELD in log_path(socket).read_text())
            await taken.wait()  # the GPU's memory, which others need not wait for any longer
            program.stands_still()

        await resume(helper, [program.pid], limits=LIMITS, proof=proof, taken=taken.set)
        program.computes_on()

    use(body)


def test_held_process_stays_so_where_the_proof_fails(use: Run, start: Start, blind: Path) -> None:
    program = start(mib=8, preload=blind, variables=ONCE)

    async def body(helper: CudaHelper) -> None:
        await waits_in_nvml(program, helper)

        async def proof() -> None:
            raise ValueError("a digest differs")

        with pytest.raises(ValueError, match="a digest differs"):
            await resume(helper, [program.pid], limits=LIMITS, proof=proof)
        program.stands_still()
        assert await state_of(helper, program) is State.LOCKED

    use(body)


def test_held_process_is_checkpointed_again(use: Run, start: Start, blind: Path) -> None:
    """As an undo does, where another process of its container could not be brought back."""
    program = start(mib=8, preload=blind, variables=ONCE)

    async def body(helper: CudaHelper) -> None:
        await waits_in_nvml(program, helper)
        await helper.restore([program.pid], PATIENCE)
        await helper.reload([program.pid], PATIENCE)
        await helper.checkpoint([program.pid], PATIENCE)
        assert await state_of(helper, program) is State.CHECKPOINTED
        await back(helper, program)
        program.computes_on()

    use(body)


def test_held_process_goes_on_after_the_helpers_death(use: Run, start: Start, blind: Path, socket: Path) -> None:
    program = start(mib=8, preload=blind, variables=ONCE)

    async def held(helper: CudaHelper) -> None:
        await waits_in_nvml(program, helper)
        await helper.restore([program.pid], PATIENCE)
        await helper.reload([program.pid], PATIENCE)
        kill_helpers(socket)
        program.stands_still()

    async def freed(helper: CudaHelper) -> None:
        while await state_of(helper, program) is not State.RUNNING:  # noqa: ASYNC110  # of another process
            await asyncio.sleep(0.05)
        program.computes_on()

    use(held)
    socket.unlink(missing_ok=True)
    use(freed)


def test_held_process_that_ends_is_forgotten(use: Run, start: Start, blind: Path, socket: Path) -> None:
    program = start(mib=8, preload=blind, variables=ONCE)

    async def body(helper: CudaHelper) -> None:
        await waits_in_nvml(program, helper)
        await helper.restore([program.pid], PATIENCE)
        await helper.reload([program.pid], PATIENCE)
        program.kill()
        assert not (await helper.states([program.pid])).processes
        another = start(mib=8, preload=blind, variables=ONCE)
        await waits_in_nvml(another, helper)
        await back(helper, another)
        another.computes_on()

    use(body)
