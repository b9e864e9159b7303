"""What the verbs of shims share: a shim knows each operation by its id, and has it joined or undone by that.

A request that is repeated with the same id joins what runs, or has the answer of what has ended. So waiting again after
a restart of the agent is the same call as beginning.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kybernate.node.containerd import Containerd, ContainerdUnreachable
from kybernate.node.failure import Failure
from kybernate.node.lookup import ContainerNotFound, KnownContainer
from kybernate.node.shim import (
    NoTask,
    NothingToCancel,
    Shim,
    ShimGone,
    ShimRefused,
    ShimTooSlow,
    shim_of,
    state_now,
    watching,
)
from kybernate.verbs.errors import OperationUndone, OutcomeUnknown
from kybernate.verbs.evidence import Evidence, Whole, judge, steps_of
from kybernate.verbs.model import Observation, Operation, Result, Target
from kybernate.verbs.node import Node, of_containers, running
from kybernate.verbs.room import Taker
from kybernate.verbs.verb import Verb
from kybernate_shim.messages import shim_pb2 as shim_wire

if TYPE_CHECKING:
    from kybernate.verbs.attempt import Attempt

ASK_AGAIN_SECONDS = 0.2

Status = tuple[shim_wire.Container | None, str]  # what a shim says of a container, or why there is nothing


@dataclass(frozen=True)
class OfShim(Verb):
    """A verb that the shim of one container carries out."""

    name: str
    namespace: str = ""

    async def call_shim(self, shim: Shim, container: KnownContainer, attempt: Attempt) -> Result:
        """Call the shim, and return its numbers. Raises as Shim's methods."""
        raise NotImplementedError

    def image_of(self, operation: Operation) -> Whole | None:
        """Return the image that proves the operation's success. Blocks."""
        return None

    def resolve(self, node: Node, id: str) -> Target:
        return of_containers(node, running(node, self.name, self.namespace))

    async def execute(self, attempt: Attempt) -> Result:
        operation, node = attempt.operation, attempt.node
        try:
            container = await container_of(node, operation, operation.target.container)
            attempt.check()
            async with shim_of(container, node.address) as shim, watching(shim, container.id, attempt.status):
                return await self.call_shim(shim, container, attempt)
        except (ShimGone, ShimTooSlow, ContainerdUnreachable) as error:
            raise OutcomeUnknown(str(error)) from error
        except ShimRefused as error:
            if error.code == "CANCELED":
                raise OperationUndone(str(error)) from error
            error.args = (f"cannot {operation.verb} {container.title}: {error}",)
            error.state = await state_now(container, node.address)
            raise

    async def cancel(self, node: Node, operation: Operation, ended: asyncio.Event) -> None:
        await cancel_part(node, operation, operation.target.container, operation.id, ended)

    async def observe(self, node: Node, operation: Operation) -> Observation:
        status, problem = await status_of(node, operation, operation.target.container)
        image = await asyncio.to_thread(self.image_of, operation)
        return judge(operation, Evidence(operation.boot != node.boot, status, problem, image))


@asynccontextmanager
async def room_for(attempt: Attempt, container: KnownContainer, bytes: int = 0) -> AsyncIterator[None]:
    """Hold room for a container while the block takes it; what is waited for is the operation's step."""
    node = attempt.node
    gpus = await asyncio.to_thread(node.gpus_of, container.id)
    taker = Taker(container.namespace, container.id, tuple(gpus), bytes, attempt.operation.id)
    async with attempt.room(taker):
        yield


async def container_of(node: Node, operation: Operation, id: str) -> KnownContainer:
    """Return a container of the operation as it is now. Raises ContainerNotFound and ContainerdUnreachable."""

    def find() -> KnownContainer:
        with Containerd(node.address) as containerd:
            found = containerd.container(operation.target.namespace, id)
        if found is None:
            raise ContainerNotFound(f"container {id} is gone")
        return found[0]

    return await asyncio.to_thread(find)


async def cancel_part(node: Node, operation: Operation, id: str, name: str, ended: asyncio.Event) -> None:
    """Ask the shim of a container to undo what it knows by `name`, until it does or the attempt has ended."""
    while not ended.is_set():
        try:
            container = await container_of(node, operation, id)
            async with shim_of(container, node.address) as shim:
                await shim.cancel(id, name)
            return
        except NothingToCancel as error:
            if error.code == "FAILED_PRECONDITION":
                return  # it has ended otherwise
        except (NoTask, ContainerNotFound):
            return  # it has ended with its container
        try:  # the request is not with the shim yet
            async with asyncio.timeout(ASK_AGAIN_SECONDS):
                await ended.wait()
        except TimeoutError:
            pass


async def status_of(node: Node, operation: Operation, id: str) -> Status:
    """Return what a container's shim says, or why there is none. Raises ContainerdUnreachable, ShimTooSlow."""
    try:
        container = await container_of(node, operation, id)
        async with shim_of(container, node.address) as shim:
            found = await shim.status(id)
    except (ContainerdUnreachable, ShimTooSlow):
        raise
    except Failure as error:
        return None, str(error)
    return (found[0], "") if found else (None, "its shim does not know it")


def suspend_result(reply: shim_wire.SuspendResponse) -> Result:
    """Return the numbers of a suspend."""
    return Result(
        vram_bytes=reply.vram_bytes,
        arena_bytes=reply.arena.bytes,
        arena_reasons=tuple(reply.arena.reasons),
        steps=steps_of(reply.steps),
    )
