"""Suspend and resume through the arena, as its tests do it again and again."""

from __future__ import annotations

from kybernate_shim.gpu.errors import CudaError
from kybernate_shim.gpu.helper_client import CudaHelper
from kybernate_shim.gpu.sequence import StepSeconds, bring_back, resume, suspend
from tests.contract.cuda_driver.helper_processes import PATIENCE

LIMITS = StepSeconds(lock=PATIENCE, checkpoint=PATIENCE, restore=PATIENCE, unlock=PATIENCE, settle=10)


async def cycle(helper: CudaHelper, pid: int, limits: StepSeconds = LIMITS) -> None:
    """Suspend and resume; where that fails, what is left must be possible to bring back."""
    try:
        await suspend(helper, lambda: [pid], limits, arena=True)
        await resume(helper, [pid], limits=limits)
    except CudaError:
        left = await bring_back(helper, [pid], limits)
    else:
        left = []
    assert left == []
