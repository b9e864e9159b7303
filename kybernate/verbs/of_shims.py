"""What the verbs of shims share: a shim knows each operation by its id, and has it joined or undone by that.

A request that is repeated with the same id joins what runs, or has the answer of what has ended. So waiting again after
a restart of the agent is the same call as beginning.

A command finds its container before it loads the protocol of shims and the format of images (`shim_calls`): that takes
longer than the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kybernate.verbs.model import Observation, Operation, Result, Target, steps_of
from kybernate.verbs.node import Node, of_containers, running
from kybernate.verbs.room import Taker
from kybernate.verbs.verb import Verb

if TYPE_CHECKING:
    from kybernate.node.lookup import KnownContainer
    from kybernate.node.shim import Shim
    from kybernate.verbs.attempt import Attempt
    from kybernate.verbs.evidence import Whole
    from kybernate_shim.messages import shim_pb2 as shim_wire


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
        from kybernate.verbs import shim_calls  # see the module

        return await shim_calls.executed(self, attempt)

    async def cancel(self, node: Node, operation: Operation, ended: asyncio.Event) -> None:
        from kybernate.verbs import shim_calls

        await shim_calls.cancel_part(node, operation, operation.target.container, operation.id, ended)

    async def observe(self, node: Node, operation: Operation) -> Observation:
        from kybernate.verbs import shim_calls

        return await shim_calls.observed(self, node, operation)


@asynccontextmanager
async def room_for(attempt: Attempt, container: KnownContainer, bytes: int = 0) -> AsyncIterator[None]:
    """Hold room for a container while the block takes it; what is waited for is the operation's step."""
    node = attempt.node
    gpus = await asyncio.to_thread(node.gpus_of, container.id)
    taker = Taker(container.namespace, container.id, tuple(gpus), bytes, attempt.operation.id)
    async with attempt.room(taker):
        yield


def suspend_result(reply: shim_wire.SuspendResponse) -> Result:
    """Return the numbers of a suspend."""
    return Result(
        vram_bytes=reply.vram_bytes,
        arena_bytes=reply.arena.bytes,
        arena_reasons=tuple(reply.arena.reasons),
        steps=steps_of(reply.steps),
    )
