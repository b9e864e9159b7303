"""Events to containerd's own stream, so that `ctr events` shows them: topic /kybernate/events/NOUN/PARTICIPLE.

They travel as containerd's ContainerUpdate, whose labels carry message and fields: containerd's clients end at an event
whose type they do not know. containerd may be away for a restart: events wait for it, and when there are too many, the
oldest are dropped.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from typing import TYPE_CHECKING, Protocol

from kybernate.messages import agent_pb2 as api
from kybernate.node.containerd import ContainerdRefused, ContainerdUnreachable
from kybernate_shim.messages import events_pb2, types_pb2
from kybernate_shim.messages.any import pack

if TYPE_CHECKING:
    from kybernate_shim.logs import Log

TOPIC = "/kybernate/events/"
OWN_NAMESPACE = "kybernate"  # of events that are about no container; containerd needs not know it
QUEUE_LIMIT = 1024
PAUSE_SECONDS = 1.0
MOST_TEXT = 4096  # characters of one label


class Forwarding(Protocol):
    """containerd, as far as it is needed here."""

    async def forward(self, envelope: types_pb2.Envelope) -> None:
        """Publish an event. Raises ContainerdUnreachable and ContainerdRefused."""


class ContainerdSink:
    """Publishes events in their order. `offer` is a sink of the log of events; `run` works until it is cancelled."""

    def __init__(self, containerd: Forwarding, log: Log) -> None:
        self._containerd = containerd
        self._log = log
        self._queue: deque[types_pb2.Envelope] = deque()
        self._news = asyncio.Event()

    def offer(self, event: api.Event) -> None:
        """Queue an event; never blocks."""
        self._queue.append(envelope_of(event))
        if len(self._queue) > QUEUE_LIMIT:
            self._log.warning("event.not_published", topic=self._queue.popleft().topic, error="containerd is away")
        self._news.set()

    async def run(self) -> None:
        """Publish what is queued."""
        while True:
            self._news.clear()
            while self._queue:
                await self._publish(self._queue.popleft())
            await self._news.wait()

    async def _publish(self, envelope: types_pb2.Envelope) -> None:
        try:
            await self._containerd.forward(envelope)
        except ContainerdUnreachable:
            self._queue.appendleft(envelope)
            await asyncio.sleep(PAUSE_SECONDS)
        except ContainerdRefused as error:
            self._log.warning("event.not_published", topic=envelope.topic, error=str(error))


def envelope_of(event: api.Event) -> types_pb2.Envelope:
    """Return containerd's form of an event."""
    labels = {"id": str(event.id), "type": event.type, "level": event.level, "message": event.message}
    labels |= {"operation": event.operation, "image": event.image, **event.fields}
    update = events_pb2.ContainerUpdate(id=event.container)
    update.labels.update({name: value[:MOST_TEXT] for name, value in labels.items() if value})
    envelope = types_pb2.Envelope(topic=topic_of(event.type), namespace=event.namespace or OWN_NAMESPACE)
    envelope.timestamp.CopyFrom(event.time)
    envelope.event.CopyFrom(pack(update))
    return envelope


def topic_of(type: str) -> str:
    """Return the topic of a type of event; containerd accepts letters and digits, with single marks between them."""
    words = [re.sub(r"[^A-Za-z0-9]+", "-", word).strip("-") for word in type.split(".")]
    return TOPIC + "/".join(word for word in words if word)
