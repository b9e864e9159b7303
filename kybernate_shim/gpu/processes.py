"""Finds the processes that hold CUDA state, by asking the driver, and locks them before another one appears.

A list from elsewhere would miss some: nvidia-smi knows nothing of pid namespaces and nothing of a process that has
initialized CUDA without a context, which is checkpointed like any other.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence

from kybernate_shim.gpu.errors import CudaCallFailed, cuda_processes_keep_appearing, join
from kybernate_shim.gpu.helper_answers import CudaProcess, State
from kybernate_shim.gpu.helper_client import STATES_SECONDS, CudaHelper

ListPids = Callable[[], Iterable[int]]  # such as Cgroup.processes: every process of the container, at this moment


async def cuda_processes(helper: CudaHelper, pids: Iterable[int], timeout: float = STATES_SECONDS) -> list[CudaProcess]:
    """Return those of `pids` that hold CUDA state. Raises the driver's failure to report on one of them."""
    states = await helper.states(sorted(set(pids)), timeout)
    if errors := [error for pid, error in states.unknown.items() if _alive(pid)]:
        raise join(errors)
    return list(states.processes.values())


async def lock_all(
    helper: CudaHelper, list_pids: ListPids, timeout: float, *, locked: Callable[[Sequence[int]], None]
) -> list[int]:
    """Lock every process that holds CUDA state, including those that begin to meanwhile; return their pids.

    Processes that are checkpointed already are left as they are and not returned. All that a look finds are locked at
    the same time, since ranks that wait for each other never drain one by one; then the next look follows, until one
    finds no new process. `locked` receives each round before the driver is called, so that an undo knows of it.
    Raises CudaError when that continues for `timeout` seconds; what is locked stays locked then.
    """
    loop = asyncio.get_running_loop()
    mine: list[int] = []
    deadline = 0.0
    while new := await _not_suspended(helper, set(list_pids()) - set(mine), timeout):
        deadline = deadline or loop.time() + timeout  # from the first answer on, since a helper may have had to start
        if loop.time() >= deadline:
            raise cuda_processes_keep_appearing(new, timeout)
        locked(new)
        mine += await _lock(helper, new, deadline - loop.time())
    return mine


async def _not_suspended(helper: CudaHelper, pids: Iterable[int], timeout: float) -> list[int]:
    found = await cuda_processes(helper, pids, timeout)
    return [it.pid for it in found if it.state is not State.CHECKPOINTED]


async def _lock(helper: CudaHelper, pids: Sequence[int], timeout: float) -> list[int]:
    """Lock `pids` and return those that are locked; the ones that have ended meanwhile are no failure."""
    try:
        await helper.lock(pids, timeout)
    except CudaCallFailed as error:
        rest = [pid for pid in pids if pid not in error.done]
        if any(_alive(pid) for pid in rest):
            raise
        return list(error.done)
    return list(pids)


def _alive(pid: int) -> bool:
    """Return whether a process lives: one that is gone, or a zombie, has no memory and so no CUDA state any more."""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat", "rb") as stat:  # noqa: PTH123  # a Path object per process would cost more
            return stat.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
