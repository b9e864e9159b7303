"""The driver's steps on any process of the node, in a container or not, with its states before and after."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kybernate.node.failure import Failure, Unavailable
from kybernate_shim.gpu import sequence
from kybernate_shim.gpu.errors import CudaError, CudaUnavailable
from kybernate_shim.gpu.helper_answers import CudaInfo, NodeGpu, State
from kybernate_shim.gpu.helper_client import SOCKET, CudaHelper, cuda_helper
from kybernate_shim.steps import Step
from kybernate_shim.undo import in_words

VERBS = ("state", "lock", "checkpoint", "restore", "unlock", "suspend", "resume")
NONE = "none"  # the state of a process that holds no CUDA state


DRIVER_UNAVAILABLE_ADVICE: Final = "`kybernate doctor` shows what is missing"


@dataclass(frozen=True)
class Done:
    """A verb that went through: the processes' states before and after, by pid, in words, and what it took."""

    before: dict[int, str]
    after: dict[int, str]
    steps: tuple[Step, ...]


def run(verb: str, pids: Sequence[int], timeout_ms: int, socket: Path = SOCKET) -> Done:
    """Do one of VERBS on all `pids`; `timeout_ms` is for each step, 0 for the driver's usual limits.

    Raises Failure, whose state says how the processes are now, and Unavailable.
    """
    return asyncio.run(_run(verb, pids, timeout_ms, socket))


def gpus(socket: Path = SOCKET) -> tuple[NodeGpu, ...]:
    """Return the GPUs of the node. Raises Unavailable."""
    return info(socket).gpus


def info(socket: Path = SOCKET) -> CudaInfo:
    """Return the driver and the GPUs of the node. Raises Unavailable."""

    async def ask() -> CudaInfo:
        async with cuda_helper(socket) as helper:
            return await helper.info()

    try:
        return asyncio.run(ask())
    except CudaError as error:
        raise Unavailable(str(error), advice=DRIVER_UNAVAILABLE_ADVICE) from error


async def _run(verb: str, pids: Sequence[int], timeout_ms: int, socket: Path) -> Done:
    limits = sequence.DEFAULT_LIMITS
    if timeout_ms:
        seconds = timeout_ms / 1000
        limits = replace(limits, lock=seconds, checkpoint=seconds, restore=seconds, unlock=seconds)
    async with cuda_helper(socket) as helper:
        try:
            before = await _states(helper, pids)
            steps = await _do(helper, verb, pids, limits)
            return Done(before, await _states(helper, pids), tuple(steps))
        except CudaUnavailable as error:
            raise Unavailable(str(error), advice=DRIVER_UNAVAILABLE_ADVICE) from error
        except CudaError as error:
            raise Failure(in_words(error), state=await _states_in_words(helper, pids)) from error


async def _do(helper: CudaHelper, verb: str, pids: Sequence[int], limits: sequence.StepSeconds) -> list[Step]:
    match verb:
        case "state":
            return []
        case "suspend":
            return (await sequence.suspend(helper, lambda: pids, limits)).steps
        case "resume":
            return await sequence.resume(helper, pids, limits=limits)
        case _:
            limit = getattr(limits, verb)
            seconds = await getattr(helper, verb)(list(pids), limit)
            return [Step(f"cuda-{verb}", max(seconds.values(), default=0.0))]


async def _states(helper: CudaHelper, pids: Sequence[int]) -> dict[int, str]:
    states = await helper.states(list(pids))
    found = {pid: process.state.name.lower() for pid, process in states.processes.items()}
    found |= {pid: State.UNKNOWN.name.lower() for pid in states.unknown}
    return {pid: found.get(pid, NONE) for pid in pids}


async def _states_in_words(helper: CudaHelper, pids: Sequence[int]) -> str:
    try:
        states = await _states(helper, pids)
    except CudaError:
        return ""
    return ", ".join(f"process {pid} is {state}" for pid, state in states.items())
