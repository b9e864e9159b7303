"""A resume begins while another process still leaves the GPU: memory is made as the room comes."""

# ruff: noqa: F811  # fixtures that are imported, and are arguments of tests
from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kybernate_shim.arena.control import PLACEHOLDERS
from kybernate_shim.gpu.errors import CudaError
from kybernate_shim.gpu.helper_answers import RoomComing, State
from kybernate_shim.gpu.helper_client import CudaHelper
from kybernate_shim.gpu.sequence import resume
from tests.contract.cuda_driver.arena_moves import (  # noqa: F401  # fixtures
    CONTEXT,
    MIB,
    WORKER,
    Run,
    Start,
    back,
    out,
    state_of,
    until,
    use,
)
from tests.contract.cuda_driver.cycles import LIMITS
from tests.fakes.cuda import Gpus
from tests.fakes.cuda.programs import Program

pytestmark = [pytest.mark.root, pytest.mark.parametrize("arena_bytes", [256 * MIB])]
SIZE = PLACEHOLDERS + 40 * MIB
AT_FIRST = CONTEXT + WORKER + PLACEHOLDERS + 4 * MIB  # room for what the driver restores, and none for the rest


@pytest.fixture
def large(start: Start, preload: Path) -> Program:
    return start(mib=SIZE // MIB, preload=preload)


def test_memory_is_made_when_the_room_has_come(use: Run, large: Program, gpus: Gpus) -> None:
    async def body(helper: CudaHelper) -> None:
        for _ in range(2):
            assert not (await out(helper, large)).taken.reasons
            with gpus.occupied(0, leaving=AT_FIRST):
                coming = RoomComing(gpus.uuids[0], LIMITS.restore)
                returning = asyncio.create_task(resume(helper, [large.pid], limits=LIMITS, coming=coming))
                await until(lambda: gpus.free(0) < AT_FIRST - CONTEXT)
                await asyncio.sleep(0.3)
                assert not returning.done()
                large.stands_still(0.05)
            steps = await returning
            assert [step.name for step in steps] == ["cuda-restore", "arena-give", "cuda-unlock"]
            large.computes_on()

    use(body)


def test_room_that_does_not_come_leaves_the_program_suspended(use: Run, large: Program, gpus: Gpus) -> None:
    async def body(helper: CudaHelper) -> None:
        await out(helper, large)
        with gpus.occupied(0, leaving=AT_FIRST):
            with pytest.raises(CudaError, match=r"its memory is in the node.s arena"):
                await resume(helper, [large.pid], limits=LIMITS, coming=RoomComing(gpus.uuids[0], 0.3))
            assert await state_of(helper, large) is State.CHECKPOINTED
        await back(helper, large)
        large.computes_on()

    use(body)
