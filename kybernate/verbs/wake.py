"""Wake and sleep: suspend and resume for those who want a state, whatever the container is in now.

A program that serves requests asks for a container that works, or for one that uses no GPU; asking again changes
nothing. A container without CUDA is frozen, and so uses no CPU either. What a container is in is looked up when the
operation begins, after all that was asked for before it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kybernate.messages import agent_pb2 as wire
from kybernate.node.containerd import Containerd
from kybernate.node.failure import Missing, Refused
from kybernate.node.lookup import KnownContainer
from kybernate.node.shim import Shim, ShimRefused, are_over
from kybernate.verbs.model import Result, Target
from kybernate.verbs.node import Node
from kybernate.verbs.of_shims import OfShim
from kybernate.verbs.restore import of_parked
from kybernate.verbs.resume import Resume
from kybernate.verbs.suspend import Suspend
from kybernate.verbs.verb import OPERATOR, PROXY, Verb

if TYPE_CHECKING:
    from kybernate.verbs.attempt import Attempt


@dataclass(frozen=True)
class Wake(OfShim):
    """Resume a container that is suspended or frozen, restore one that is parked; one that is active stays as it is.

    `room_timeout` is how many seconds it may wait for room on the GPUs.
    """

    verb = "wake"
    call = "Operations/Wake"
    request = wire.WakeRequest
    roles = frozenset({OPERATOR, PROXY})

    room_timeout: float = 0.0

    def meant(self, node: Node) -> Verb:
        return of_parked(node, self.name) or self

    async def call_shim(self, shim: Shim, container: KnownContainer, attempt: Attempt) -> Result:
        """Raises Missing as well, where the container has ended, which containerd may not know yet."""
        try:
            return await self._woken(shim, container, attempt)
        except ShimRefused as error:
            if error.code == "CANCELED" or not are_over(await shim.status(container.id)):
                raise
            raise Missing(f"container {container.title} has ended: {error}") from error

    async def _woken(self, shim: Shim, container: KnownContainer, attempt: Attempt) -> Result:
        found = await shim.status(container.id)
        if any(status.state == "paused" for status in found):
            await asyncio.to_thread(_thaw, attempt.node, container)
        if not any(status.suspended for status in found):
            return Result()
        resume = Resume(self.name, self.namespace, room_timeout=self.room_timeout)
        return await resume.call_shim(shim, container, attempt)


@dataclass(frozen=True)
class Sleep(OfShim):
    """Suspend a container that is active, freeze one without CUDA; one that sleeps already stays as it is.

    `unless_used`: it fails where proxies report requests in flight. `gpu_only`: a container without CUDA works on, as
    one does that has a seat and has not used its GPU yet.
    """

    verb = "sleep"
    call = "Operations/Sleep"
    request = wire.SleepRequest
    roles = frozenset({OPERATOR, PROXY})

    unless_used: bool = False
    gpu_only: bool = False

    def resolve(self, node: Node, id: str) -> Target:
        try:
            return super().resolve(node, id)
        except Missing:
            parked = node.parked(self.name)
            if parked is None:
                raise
            return Target(title=parked.id)  # without a container: nothing is done

    async def execute(self, attempt: Attempt) -> Result:
        return await super().execute(attempt) if attempt.operation.target.container else Result()

    async def call_shim(self, shim: Shim, container: KnownContainer, attempt: Attempt) -> Result:
        found = await shim.status(container.id, gpu=True)
        if any(status.suspended or status.state == "paused" for status in found):
            return Result()
        if self.unless_used and (count := attempt.node.in_flight(container.namespace, container.id)):
            raise Refused(f"{count} requests are in flight at {container.id}, as proxies report", state="it works on")
        if all(status.state == "running" and not (status.cuda_pids or status.note or status.phase) for status in found):
            if not self.gpu_only:
                await asyncio.to_thread(_freeze, attempt.node, container)
            return Result()
        return await Suspend(self.name, self.namespace).call_shim(shim, container, attempt)


def _freeze(node: Node, container: KnownContainer) -> None:
    with Containerd(node.address) as containerd:
        containerd.pause(container.namespace, container.id)


def _thaw(node: Node, container: KnownContainer) -> None:
    with Containerd(node.address) as containerd:
        containerd.resume(container.namespace, container.id)
