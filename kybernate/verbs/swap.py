"""Swap: one container leaves the GPUs, and another comes in its place."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kybernate.messages import agent_pb2 as wire
from kybernate.node.containerd import ContainerdUnreachable
from kybernate.node.failure import Failure, Invalid
from kybernate.node.swap import NotSwapped, SwapNames, swap
from kybernate.verbs.errors import NODE_REBOOTED_ADVICE, OperationUndone, OutcomeUnknown, fault_of
from kybernate.verbs.model import Observation, Operation, Result, Seen, Target, steps_of
from kybernate.verbs.node import Node, of_containers, running
from kybernate.verbs.of_shims import room_for, suspend_result
from kybernate.verbs.shim_calls import Status, cancel_part, container_of, status_of
from kybernate.verbs.verb import Verb
from kybernate_shim.messages import shim_pb2 as shim_wire

if TYPE_CHECKING:
    from kybernate.verbs.attempt import Attempt

WAIT_SECONDS = 10.0


@dataclass(frozen=True)
class Swap(Verb):
    """`leaving` is suspended, and `coming` resumed, which waits `room_timeout` seconds for the room that is left."""

    verb = "swap"
    call = "Operations/Swap"
    request = wire.SwapRequest

    leaving: str
    coming: str
    namespace: str = ""
    room_timeout: float = 0.0

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.leaving == self.coming:
            yield "coming", "is the same container as `leaving`: it cannot be swapped with itself"

    def resolve(self, node: Node, id: str) -> Target:
        leaving = running(node, self.leaving, self.namespace)
        coming = running(node, self.coming, self.namespace)
        if leaving.id == coming.id:
            raise Invalid(f"{leaving.title} cannot be swapped with itself", state="no operation was started")
        if leaving.namespace != coming.namespace:
            raise Invalid("both containers of a swap are of one namespace", state="no operation was started")
        return of_containers(node, leaving, coming)

    async def execute(self, attempt: Attempt) -> Result:
        operation, node = attempt.operation, attempt.node
        try:
            leaving = await container_of(node, operation, operation.target.container)
            coming = await container_of(node, operation, operation.target.other)
            attempt.check()
            wait = self.room_timeout or WAIT_SECONDS
            async with room_for(attempt, coming):
                done = await swap(leaving, coming, node.address, wait, operation=operation.id)
        except ContainerdUnreachable as error:
            raise OutcomeUnknown(str(error)) from error
        except NotSwapped as error:
            if attempt.stop.is_set() and error.undone:
                raise OperationUndone(f"{error}; {error.state}") from error
            raise
        left = suspend_result(done.left)
        steps = (*left.steps, *steps_of(done.came.steps))
        return Result(
            vram_bytes=done.came.vram_bytes,
            arena_bytes=left.arena_bytes,
            arena_reasons=left.arena_reasons,
            left_vram_bytes=left.vram_bytes,
            left_spared_bytes=sum(step.spared_bytes for step in left.steps),
            seconds=done.seconds,
            steps=steps,
        )

    async def cancel(self, node: Node, operation: Operation, ended: asyncio.Event) -> None:
        parts = _parts(operation).items()
        await asyncio.gather(*(cancel_part(node, operation, id, name, ended) for id, name in parts))

    async def observe(self, node: Node, operation: Operation) -> Observation:
        found = {id: await status_of(node, operation, id) for id in _parts(operation)}
        return _judged(operation, found, rebooted=operation.boot != node.boot)


def _parts(operation: Operation) -> Mapping[str, str]:
    """Return by container the name under which its shim knows the operation."""
    names = SwapNames.of(operation.id)
    return {operation.target.container: names.leaving, operation.target.other: names.coming}


def _judged(operation: Operation, found: Mapping[str, Status], *, rebooted: bool) -> Observation:
    """Where both shims answer, repeating the swap joins each part that runs and skips each that has ended."""
    target = operation.target
    gone = [id for id, (status, _) in found.items() if status is None]
    if not gone:
        known = any(_knows(status, operation.id) for status, _ in found.values() if status is not None)
        return Observation(Seen.AT_WORK if known else Seen.ABSENT, "both shims answer")
    words = "; ".join(f"{id}: {_state(status, problem)}" for id, (status, problem) in found.items())
    error = (
        Failure("the node was restarted during the swap", state=words, advice=NODE_REBOOTED_ADVICE)
        if rebooted
        else NotSwapped(f"a container of the swap of {target.title} and {target.other_title} has ended", state=words)
    )
    return Observation(Seen.FAILED, words, fault=fault_of(error))


def _knows(status: shim_wire.Container, id: str) -> bool:
    names = {status.operation, status.last.operation, *(ended.operation for ended in status.earlier)}
    return any(name.startswith(f"{id}.") for name in names)


def _state(status: shim_wire.Container | None, problem: str) -> str:
    if status is None:
        return problem
    return f"{status.state}{', its VRAM in host memory' if status.suspended else ''}"
