"""The GPU state in a container's status: what the driver reports about its processes, and what to do about it.

The driver is asked where no operation runs, because it answers for no process in the middle of an operation; a
frozen process does not answer either. Calls that a process may block are made outside the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kybernate_shim.gpu.evidence import holders
from kybernate_shim.linux.own_thread import in_own_thread
from kybernate_shim.messages import shim_pb2 as wire

if TYPE_CHECKING:
    from kybernate_shim.checkpoint.gpu.left import ArenaUse
    from kybernate_shim.task.container import Container

LOOK_SECONDS = 2.0
ANSWER_SECONDS = 2.0
DRIVER_SECONDS = 20.0  # a helper that has to be started included


def arena_message(use: ArenaUse) -> wire.Arena:
    return wire.Arena(asked=use.asked, bytes=use.bytes, reasons=use.reasons)


async def ask_driver(container: Container, reply: wire.Container) -> None:
    """Add what the driver says of the container's processes to `reply`. Never raises an expected error."""
    cgroup = container.cgroup
    if cgroup is None or container.gpu.busy or container.init.state != "running":
        return
    try:
        pids = await in_own_thread(lambda: holders(cgroup.processes()), LOOK_SECONDS)
    except (OSError, TimeoutError):
        reply.note = f"its processes could not be examined within {LOOK_SECONDS:g} s"
        return
    reply.cuda_pids.extend(pids)
    if not pids:
        return
    found = await _states(pids, reply)
    if container.gpu.busy:  # an operation has begun meanwhile: the driver's answer may be from the middle of it
        return
    reply.cuda.extend(wire.CudaProcess(pid=pid, state=state) for pid, state in found.items())
    if found:
        reply.gpu = in_one_word(found.values())
        reply.suspended = reply.gpu == "suspended"
        reply.note = reply.note or advice(reply.gpu, container.id)


def in_one_word(states: Iterable[str]) -> str:
    """Return the GPU state of a container whose processes are in these states according to the driver."""
    found = set(states)
    for state in ("failed", "locked", "unknown"):
        if state in found:
            return state
    if found == {"checkpointed"}:
        return "suspended"
    return "partly suspended" if "checkpointed" in found else "attached"


def advice(state: str, id: str) -> str:
    """Say what to do about a GPU state that no operation works on; empty where nothing has to be done."""
    return {
        "locked": f"processes are locked, and no operation works on them: `kybernate resume {id}` unlocks them",
        "partly suspended": f"`kybernate suspend {id}` suspends the rest, `kybernate resume {id}` resumes all",
        "failed": "a process has failed in the driver: end the container",
        "unknown": "the driver does not report on a process; `kybernate doctor` shows what the node lacks",
    }.get(state, "")


async def _states(pids: list[int], reply: wire.Container) -> dict[int, str]:
    # Only where there are processes with CUDA.
    from kybernate_shim.gpu.errors import CudaError
    from kybernate_shim.gpu.helper_client import cuda_helper

    try:
        async with asyncio.timeout(DRIVER_SECONDS), cuda_helper() as helper:
            states = await helper.states(pids, ANSWER_SECONDS)
    except (CudaError, TimeoutError) as error:
        reply.note = f"the driver does not answer: {error or f'no answer in {DRIVER_SECONDS:g} s'}"
        return {}
    found = {pid: process.state.name.lower() for pid, process in states.processes.items()}
    return found | dict.fromkeys(states.unknown, "unknown")
