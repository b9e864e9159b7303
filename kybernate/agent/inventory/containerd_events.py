"""containerd's events as one endless stream, over restarts of containerd.

A follower that lists everything at `Connected` misses nothing: the subscription exists by then. containerd does
not say when it does, so an event of our own is published until it comes back.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from kybernate.agent.inventory.notices import FILTERS, PROBE, Notice, notice_of
from kybernate.node.containerd import ContainerdRefused, ContainerdUnreachable
from kybernate_shim.messages import events_pb2, types_pb2
from kybernate_shim.messages.any import pack

NAMESPACE = "kybernate"  # of the probe; containerd needs not know it
PROBE_SECONDS = 0.1
PAUSE_SECONDS = 0.2


@dataclass(frozen=True)
class Connected:
    """Every event from now on will be seen; what happened before has to be looked at."""


@dataclass(frozen=True)
class Lost:
    """containerd is away; events are missed until the next `Connected`."""

    reason: str


class EventSource(Protocol):
    """containerd, as far as it is needed here."""

    def events(self, filters: Sequence[str]) -> AsyncGenerator[types_pb2.Envelope, None]:
        """Yield events. Raises ContainerdUnreachable and ContainerdRefused."""

    async def forward(self, envelope: types_pb2.Envelope) -> None:
        """Publish an event; raises the same."""

    async def ready(self, seconds: float) -> bool:
        """Wait until it can be reached."""


async def follow(containerd: EventSource) -> AsyncGenerator[Connected | Lost | Notice, None]:
    """Yield notices without end; `Connected` before the first of each connection, `Lost` after its last.

    A notice may have come before its `Connected`'s listing. The iterator has to be closed by `aclosing`.
    """
    while True:
        reason = "containerd has ended the stream of events"
        try:
            async with aclosing(_subscription(containerd)) as found:
                async for one in found:
                    yield one
        except (ContainerdUnreachable, ContainerdRefused) as error:
            reason = str(error)
        yield Lost(reason)
        await asyncio.sleep(PAUSE_SECONDS)
        while not await containerd.ready(seconds=30):
            pass


async def _subscription(containerd: EventSource) -> AsyncGenerator[Connected | Notice, None]:
    nonce, connected = uuid.uuid4().hex, False
    async with aclosing(containerd.events(FILTERS)) as stream:
        probing = asyncio.create_task(_probe(containerd, nonce))
        try:
            async for envelope in stream:
                notice = notice_of(envelope)
                if notice is None:
                    continue
                if notice.topic == PROBE:
                    if notice.id == nonce and not connected:
                        connected = True
                        probing.cancel()
                        yield Connected()
                elif connected:
                    yield notice
        finally:
            probing.cancel()
            await asyncio.wait({probing})


async def _probe(containerd: EventSource, nonce: str) -> None:
    """Publish our event until this is cancelled; a containerd that is away ends the stream, too."""
    envelope = types_pb2.Envelope(namespace=NAMESPACE, topic=PROBE)
    envelope.timestamp.GetCurrentTime()
    envelope.event.CopyFrom(pack(events_pb2.ContainerUpdate(id=nonce)))
    while True:
        try:
            await containerd.forward(envelope)
        except (ContainerdUnreachable, ContainerdRefused):
            pass
        await asyncio.sleep(PROBE_SECONDS)
