"""Suspend: a container's VRAM into host memory, in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kybernate.messages import agent_pb2 as wire
from kybernate.verbs.model import Result
from kybernate.verbs.of_shims import OfShim, suspend_result
from kybernate_shim.messages import shim_pb2 as shim_wire

if TYPE_CHECKING:
    from kybernate.node.lookup import KnownContainer
    from kybernate.node.shim import Shim
    from kybernate.verbs.attempt import Attempt


@dataclass(frozen=True)
class Suspend(OfShim):
    """`lock_timeout` in seconds; 0 means as configured."""

    verb = "suspend"
    call = "Operations/Suspend"
    request = wire.SuspendRequest

    lock_timeout: float = 0.0

    async def call_shim(self, shim: Shim, container: KnownContainer, attempt: Attempt) -> Result:
        milliseconds = round(self.lock_timeout * 1000)
        request = shim_wire.SuspendRequest(id=container.id, timeout_ms=milliseconds, operation=attempt.operation.id)
        return suspend_result(await shim.suspend(request))
