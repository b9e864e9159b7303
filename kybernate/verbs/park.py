"""Park: VRAM of a suspended container from host memory to the disk, while its processes stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kybernate.messages import agent_pb2 as wire
from kybernate.verbs.model import Result, steps_of
from kybernate.verbs.of_shims import OfShim
from kybernate_shim.messages import shim_pb2 as shim_wire

if TYPE_CHECKING:
    from kybernate.node.lookup import KnownContainer
    from kybernate.node.shim import Shim
    from kybernate.verbs.attempt import Attempt


@dataclass(frozen=True)
class Park(OfShim):
    """Its result has the bytes that are on the disk, as VRAM. A wake or a resume brings them back."""

    verb = "park"
    call = "Operations/Park"
    request = wire.ParkRequest

    async def call_shim(self, shim: Shim, container: KnownContainer, attempt: Attempt) -> Result:
        done = await shim.park(shim_wire.ParkRequest(id=container.id, operation=attempt.operation.id))
        return Result(vram_bytes=done.parked_bytes, steps=steps_of(done.steps))
