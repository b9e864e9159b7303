"""Programs that fork all the time while they are suspended and resumed, as training does whose workers come and go."""

# ruff: noqa: F811  # fixtures that are imported, and are arguments of tests
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kybernate_shim.gpu.helper_client import CudaHelper
from kybernate_shim.gpu.sequence import resume, suspend
from tests.contract.cuda_driver.arena_moves import Run, use  # noqa: F401  # a fixture
from tests.contract.cuda_driver.cycles import LIMITS
from tests.fakes.cuda.programs import Program

pytestmark = pytest.mark.root
Start = Callable[..., Program]
FORKS = {"COMPUTES_FORKS": "100"}
CYCLES = 15
WARM_UPS = 500


@pytest.mark.parametrize("arena", [True, False])
def test_child_that_is_forked_meanwhile_has_nothing_of_what_is_handed_out(
    use: Run, start: Start, preload: Path, arena: bool
) -> None:
    """It would keep memory on the GPU, and could not be dumped."""
    program = start(mib=16, variables=FORKS, preload=preload)

    async def body(helper: CudaHelper) -> None:
        for _ in range(CYCLES):
            suspended = await suspend(helper, lambda: [program.pid], LIMITS, arena=arena)
            assert not suspended.taken.reasons
            await resume(helper, suspended.pids, limits=LIMITS)
            program.wait_for_steps(1)

    use(body)
    program.computes_on()


def test_child_that_is_forked_while_its_memory_is_examined_has_none_of_it(
    use: Run, start: Start, preload: Path
) -> None:
    """What is done ahead of a suspend is done while the program's threads run."""
    program = start(mib=16, variables={"COMPUTES_FORKS": "1"}, preload=preload)

    async def body(helper: CudaHelper) -> None:
        for _ in range(WARM_UPS):
            await helper.warm([program.pid], LIMITS.checkpoint)

    use(body)
    program.computes_on()
