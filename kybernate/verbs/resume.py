"""Resume: VRAM back from host memory, in place; a parked container is restored from its image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kybernate.messages import agent_pb2 as wire
from kybernate.verbs.model import Result, steps_of
from kybernate.verbs.node import Node
from kybernate.verbs.of_shims import OfShim, room_for
from kybernate.verbs.verb import Verb
from kybernate_shim.messages import shim_pb2 as shim_wire

if TYPE_CHECKING:
    from kybernate.node.lookup import KnownContainer
    from kybernate.node.shim import Shim
    from kybernate.verbs.attempt import Attempt


@dataclass(frozen=True)
class Resume(OfShim):
    """In seconds: `room_timeout` is how long it may wait for room on the GPUs, `restore_timeout` the driver's limit."""

    verb = "resume"
    call = "Operations/Resume"
    request = wire.ResumeRequest

    room_timeout: float = 0.0
    restore_timeout: float = 0.0

    def meant(self, node: Node) -> Verb:
        from kybernate.verbs.restore import of_parked  # it loads the store: see of_shims.py

        return of_parked(node, self.name) or self

    async def call_shim(self, shim: Shim, container: KnownContainer, attempt: Attempt) -> Result:
        request = shim_wire.ResumeRequest(
            id=container.id,
            timeout_ms=round(self.restore_timeout * 1000),
            room_timeout_ms=round(self.room_timeout * 1000),
            operation=attempt.operation.id,
        )
        async with room_for(attempt, container):
            done = await shim.resume(request)
        return Result(vram_bytes=done.vram_bytes, steps=steps_of(done.steps))
