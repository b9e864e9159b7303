"""The pretended driver and the real CRIU: refused while on the GPU, carried while checkpointed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.gpu.errors import GpuPair
from kybernate_shim.gpu.helper_answers import State
from kybernate_shim.gpu.helper_client import CudaHelper
from kybernate_shim.gpu.sequence import StepSeconds, resume, suspend
from tests.contract.cuda_driver.helper_processes import PATIENCE
from tests.fakes.cuda import Gpus

Run = Callable[[Callable[[CudaHelper], Any]], Any]

pytestmark = [pytest.mark.root, pytest.mark.criu]
LIMITS = StepSeconds(lock=PATIENCE, checkpoint=PATIENCE, restore=PATIENCE, unlock=PATIENCE)


class Detached:
    """`computes` in a session of its own that prints into a file, as CRIU can take and bring back."""

    def __init__(self, directory: Path, libraries: Path, gpus: Gpus, preload: Path | None = None) -> None:
        self.images = directory / "images"
        self.images.mkdir()
        self._output = directory / "output"
        environment = dict(os.environ) | gpus.environment(libraries)
        environment |= {"LD_PRELOAD": str(preload)} if preload else {}
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [libraries / "computes", "4", "10"],
                env=environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self.wait_for_steps(1)

    def wait_for_steps(self, count: int, seconds: float = 20.0) -> None:
        """Wait for `count` more steps; each line was checked word by word by the program itself."""
        wanted, until = self.steps() + count, time.monotonic() + seconds
        while self.steps() < wanted:
            assert time.monotonic() < until, f"process {self.pid} stands still at step {self.steps()}"
            time.sleep(0.02)

    def steps(self) -> int:
        """Return how many steps were printed, and fail when one of them is missing or wrong."""
        lines = self._output.read_text().splitlines()
        assert [line.split()[:2] for line in lines] == [["step", str(number + 1)] for number in range(len(lines))]
        return len(lines)

    def dump(self) -> subprocess.CompletedProcess[str]:
        return self._criu("dump", "--tree", str(self.pid))

    def restore(self) -> subprocess.CompletedProcess[str]:
        self._process.wait()  # CRIU has killed it; its pid must be free
        return self._criu("restore", "--restore-detached")

    def log(self, name: str) -> str:
        return (self.images / f"{name}.log").read_text(errors="replace")

    def kill(self) -> None:
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def _criu(self, action: str, *options: str) -> subprocess.CompletedProcess[str]:
        command = ["criu", action, *options, "--images-dir", str(self.images), "-v4", "--log-file", f"{action}.log"]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture
def program(tmp_path: Path, libraries: Path, gpus: Gpus) -> Iterator[Detached]:
    started = Detached(tmp_path, libraries, gpus)
    yield started
    started.kill()


def test_criu_refuses_a_process_on_the_gpu(program: Detached) -> None:
    assert program.dump().returncode != 0
    errors = [line for line in program.log("dump").splitlines() if "Error" in line]
    assert any("to mmap" in line for line in errors), "\n".join(errors)
    program.wait_for_steps(3)


@pytest.mark.parametrize("move", [False, True])
def test_criu_carries_a_checkpointed_process(program: Detached, use: Run, gpus: Gpus, move: bool) -> None:
    pid = program.pid
    first, second = gpus.uuids
    pairs = [GpuPair(first, second), GpuPair(second, first)] if move else []

    async def checkpoint(helper: CudaHelper) -> None:
        await helper.lock([pid], PATIENCE)
        await helper.checkpoint([pid], PATIENCE)

    async def bring_back(helper: CudaHelper) -> None:
        process = (await helper.states([pid], PATIENCE)).processes[pid]
        assert process.state is State.CHECKPOINTED
        assert Path(f"/proc/{pid}/task/{process.restore_thread}").is_dir()
        await helper.restore([pid], 5, pairs)
        assert [used > 0 for used in gpus.used()] == [not move, move]
        await helper.unlock([pid], PATIENCE)

    use(checkpoint)
    dumped = program.dump()
    assert dumped.returncode == 0, program.log("dump")[-3000:]
    before = program.steps()
    assert not Path(f"/proc/{pid}/exe").exists()
    restored = program.restore()
    assert restored.returncode == 0, program.log("restore")[-3000:]
    use(bring_back)
    program.wait_for_steps(10)
    assert program.steps() >= before + 10


def test_program_with_the_preload_library_can_use_the_arena_after_a_restore(
    use_arena: Run, tmp_path: Path, libraries: Path, gpus: Gpus, preload: Path, memory: Memory
) -> None:
    program = Detached(tmp_path, libraries, gpus, preload)
    pid = program.pid

    async def leave(helper: CudaHelper) -> None:
        await suspend(helper, lambda: [pid], LIMITS)

    async def through_the_arena(helper: CudaHelper) -> None:
        await resume(helper, [pid], limits=LIMITS)
        program.wait_for_steps(3)
        for _ in range(3):
            suspended = await suspend(helper, lambda: [pid], LIMITS, arena=True)
            assert suspended.taken.bytes == sum(one.size for one in memory.kept(ArenaOwner.of(pid))) == 4 << 20
            await resume(helper, [pid], limits=LIMITS)
            program.wait_for_steps(3)

    try:
        use_arena(leave)
        dumped = program.dump()
        assert dumped.returncode == 0, program.log("dump")[-3000:]
        restored = program.restore()
        assert restored.returncode == 0, program.log("restore")[-3000:]
        use_arena(through_the_arena)
    finally:
        program.kill()
