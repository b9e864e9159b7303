"""Programs whose threads have names like the driver's own: these are stopped as any others while memory is moved."""

# ruff: noqa: F811  # fixtures that are imported, and are arguments of tests
from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kybernate_shim.gpu.helper_client import CudaHelper
from tests.contract.cuda_driver.arena_moves import SLOW, Run, back, out, use  # noqa: F401  # a fixture
from tests.fakes.cuda import Gpus
from tests.fakes.cuda.build import SOURCES
from tests.fakes.cuda.programs import Program

pytestmark = pytest.mark.root
# Computes in a thread of its own, whose name and the main thread's are the first arguments.
NAMED = """
import ctypes, os, sys, threading
name = ctypes.CDLL(None).prctl
main, worker = (one.encode() for one in sys.argv[1:3])
del sys.argv[1:3]
import computes
name(15, main, 0, 0, 0)
def compute():
    name(15, worker, 0, 0, 0)
    try:
        computes.main()
    finally:
        os._exit(1)
threading.Thread(target=compute).start()
"""


@pytest.fixture
def named(gpus: Gpus, libraries: Path, preload: Path) -> Iterator[Callable[[str, str], Program]]:
    """Start programs whose threads have names of the program's."""
    started = []

    def start(main: str, worker: str) -> Program:
        environment = dict(os.environ) | gpus.environment(libraries) | {"LD_PRELOAD": str(preload)}
        words = [sys.executable, "-c", NAMED, main, worker, "4", "0"]
        program = Program([*words], environment | {"PYTHONPATH": str(SOURCES)})
        started.append(program)
        program.wait_for_steps(1)
        return program

    yield start
    for program in started:
        program.kill()


def test_programs_own_threads_are_stopped_whatever_their_names(
    use: Run, named: Callable[[str, str], Program], gpus: Gpus
) -> None:
    """Python 3.14 gives the kernel the names of its threads; a thread without one has the program's."""
    programs = named("python", "cuda_prefetch"), named("cuda_server", "cuda_server")

    async def body(helper: CudaHelper) -> None:
        gpus.slow(SLOW)
        for _ in range(3):
            suspended = await out(helper, *programs)
            assert not suspended.taken.reasons
            await back(helper, *programs)
            for program in programs:
                program.computes_on()

    use(body)
