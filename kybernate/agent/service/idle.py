"""Suspends that wait until a container is idle: neither a call on the restricted socket, nor work on a GPU.

A call ends the wait, as the program is awake then. Work on a GPU, as NVML samples it for each process, only makes the
time start again. A wait is in memory alone: it ends with the agent, and the container then simply is not suspended.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from kybernate.agent.inventory.gpus import Activity
from kybernate.agent.operations.submission import AGENT_STOPPING_ADVICE
from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Failure, Unavailable

PREFIX: Final = "idle-"  # begins the ids of waits, which no operation has
KEPT: Final = 1024  # waits, ended ones included
LOOK_SECONDS: Final = 5.0  # NVML keeps its samples longer than that

Submit = Callable[[], Awaitable[wire.Operation]]
Look = Callable[[], Awaitable[Activity]]


@dataclass
class Wait:
    """The wait of one container: an operation that is not in the journal yet, then the one that it became."""

    operation: wire.Operation
    key: str
    task: asyncio.Task[None] | None = None


class Idleness:
    """Waits by the container; each has one at most, and the last one is remembered."""

    def __init__(self) -> None:
        self._waits: dict[str, Wait] = {}
        self._stopping = False

    def begin(
        self, container: str, seconds: float, key: str, about: wire.Operation, look: Look, submit: Submit
    ) -> wire.Operation:
        """Call `submit` after so many seconds without a call or a `look` that differs; return what stands for that.

        A wait with the same idempotency key is the same wait. Raises Unavailable.
        """
        if self._stopping:
            raise Unavailable("the agent is stopping", state="nothing was started", advice=AGENT_STOPPING_ADVICE)
        known = self._waits.get(container)
        if known is not None and key and known.key == key:
            return known.operation
        self.interrupt(container)
        operation = wire.Operation()
        operation.CopyFrom(about)
        operation.id, operation.state = f"{PREFIX}{secrets.token_hex(8)}", wire.PENDING
        operation.created.FromNanoseconds(time.time_ns())
        operation.notes.append(f"waits until the container has made no call and computed nothing for {seconds:g} s")
        wait = self._waits[container] = Wait(operation, key)
        wait.task = asyncio.create_task(self._wait(wait, seconds, look, submit))
        self._forget()
        return operation

    def find(self, container: str, id: str) -> wire.Operation | None:
        """Return the wait with an id, or the operation that it became, None where there is none (any more)."""
        wait = self._waits.get(container)
        return wait.operation if wait is not None and id.startswith(PREFIX) else None

    def interrupt(self, container: str) -> None:
        """End the wait of a container, if there is one."""
        wait = self._waits.get(container)
        if wait is None or wait.operation.state != wire.PENDING or not wait.operation.id.startswith(PREFIX):
            return
        if wait.task is not None:
            wait.task.cancel()
        _end(wait, wire.CANCELLED)
        wait.operation.notes.append("a call of the container ended the wait")

    def stop(self) -> None:
        """End all waits, and let no other begin."""
        self._stopping = True
        for container in list(self._waits):
            self.interrupt(container)

    async def _wait(self, wait: Wait, seconds: float, look: Look, submit: Submit) -> None:
        await _quiet(wait, seconds, look)
        try:
            wait.operation = await submit()
        except Failure as error:
            _end(wait, wire.FAILED)
            wait.operation.error.CopyFrom(
                wire.Error(type=type(error).__name__, message=str(error), state=error.state, advice=error.advice)
            )

    def _forget(self) -> None:
        while len(self._waits) > KEPT:
            oldest = next(iter(self._waits))
            self.interrupt(oldest)
            del self._waits[oldest]


async def _quiet(wait: Wait, seconds: float, look: Look) -> None:
    """Return when the container has computed nothing for so many seconds, as far as looks show it."""
    known, since = await look(), time.monotonic()
    if known.unknown:
        wait.operation.notes.append(f"NVML does not report work on {', '.join(known.unknown)}: only calls count there")
    while (left := since + seconds - time.monotonic()) > 0:
        await asyncio.sleep(min(left, LOOK_SECONDS))
        if (now := await look()).mark > known.mark:
            known, since = now, time.monotonic()


def _end(wait: Wait, state: wire.OperationState) -> None:
    wait.operation.state = state
    wait.operation.ended.FromNanoseconds(time.time_ns())
