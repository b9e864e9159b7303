"""Programs with the preload library, whose memory goes into the arena and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.gpu.helper_answers import State
from kybernate_shim.gpu.helper_client import CudaHelper
from kybernate_shim.gpu.sequence import resume, suspend
from tests.contract.cuda_driver.cycles import LIMITS
from tests.fakes.cuda.programs import Program

Start = Callable[..., Program]
Run = Callable[[Callable[[CudaHelper], Any]], Any]

MIB = 1 << 20
SIZE = 64 * MIB
CONTEXT = 8 * MIB
SLOW = 30  # seconds for a GiB
WORKER = 10 * MIB  # what the arena's worker has of a GPU: a context, and room for hashes


@pytest.fixture
def use(use_arena: Run) -> Run:
    """Every helper here has an arena."""
    return use_arena


@pytest.fixture
def program(start: Start, preload: Path) -> Program:
    return start(mib=8, preload=preload)


async def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  # of another process
            await asyncio.sleep(0.01)


async def out(helper: CudaHelper, *programs: Program) -> Any:
    return await suspend(helper, lambda: [program.pid for program in programs], LIMITS, arena=True)


async def back(helper: CudaHelper, *programs: Program) -> Any:
    return await resume(helper, [program.pid for program in programs], limits=LIMITS)


async def state_of(helper: CudaHelper, program: Program) -> State:
    return (await helper.states([program.pid])).processes[program.pid].state


def in_arena(memory: Memory, program: Program) -> int:
    return sum(one.size for one in memory.kept(ArenaOwner.of(program.pid)))
