"""A program that calls the driver without a pause, suspended and resumed at random moments."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.gpu.errors import CudaError
from kybernate_shim.gpu.helper_client import CudaHelper
from kybernate_shim.gpu.sequence import resume, suspend
from tests.contract.cuda_driver.cycles import LIMITS
from tests.fakes.actor import eventually
from tests.fakes.cuda import Gpus
from tests.fakes.cuda.programs import Zoo

Run = Callable[[Callable[[CudaHelper], Any]], Any]

pytestmark = pytest.mark.root
THREADS = 3
CYCLES = 10
LONGEST = 0.2  # s between two cycles, and of being suspended


@pytest.fixture
def zoo(gpus: Gpus, libraries: Path, preload: Path) -> Iterator[Zoo]:
    started = Zoo(gpus, libraries, preload)
    yield started
    started.kill()


@pytest.mark.parametrize("arena", [True, False])
def test_program_that_makes_all_calls_notices_no_suspend(use_arena: Run, zoo: Zoo, arena: bool) -> None:
    async def body(helper: CudaHelper) -> None:
        zoo.loop(THREADS)
        for _ in range(CYCLES):
            before = zoo.count()
            assert eventually(lambda before=before: zoo.count() > before), "it stands still"
            await asyncio.sleep(random.uniform(0, LONGEST))
            try:
                suspended = await suspend(helper, lambda: [zoo.pid], LIMITS, arena=arena)
                await asyncio.sleep(random.uniform(0, LONGEST))
                await resume(helper, [zoo.pid], limits=LIMITS)
            except CudaError:
                zoo.count()  # if the program has ended, its last words are the reason
                raise
            assert bool(suspended.taken.bytes) == arena, suspended.taken.reasons

    use_arena(body)
    assert zoo.stop() > CYCLES
