"""Images of which no event was received: a shim says once that it has written one, and the agent may be away just then.

The agent's operation outlives the agent, so what has become of it is known in any case. Who follows events, as a pod's
owner or a webhook does, sees each image once, reported by the shim or by the operation.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kybernate.agent.inventory.containers import Containers
from kybernate.agent.journal import JournalUnusable
from kybernate.messages import agent_pb2 as wire

if TYPE_CHECKING:
    from kybernate.agent.events.store import EventStore
    from kybernate_shim.logs import Log

CHECKPOINTED = "container.checkpointed"
FIGURES = ("bytes", "frozen_ms", "vram_bytes")  # of an operation's result, as a shim has them


class Missed:
    """Works while `run` runs. `ended` takes each operation that has ended; it never blocks."""

    def __init__(self, store: EventStore, containers: Containers, log: Log) -> None:
        self._store, self._containers, self._log = store, containers, log
        self._queue: asyncio.Queue[wire.Operation] = asyncio.Queue()

    def ended(self, operation: wire.Operation) -> None:
        succeeded = operation.verb == "checkpoint" and operation.state == wire.SUCCEEDED
        if succeeded and not self._containers.has_followed(operation.started.ToNanoseconds()):
            self._queue.put_nowait(operation)

    async def run(self) -> None:
        """Record what was missed, until cancelled."""
        await self._containers.ready.wait()
        while True:
            operation = await self._queue.get()
            try:
                if not await self._was_recorded_before(operation):
                    self._record(operation)
            except JournalUnusable as error:
                self._log.warning("event.not_recorded", type=CHECKPOINTED, image=operation.image, error=str(error))

    async def _was_recorded_before(self, operation: wire.Operation) -> bool:
        """Return whether an earlier run of the agent has recorded the image. This run's events are known without it."""
        began_ns = operation.started.ToNanoseconds()
        if began_ns > self._store.started.time.ToNanoseconds():
            return False
        about = CHECKPOINTED, operation.namespace, operation.container, operation.image
        return await self._store.has(lambda it: (it.type, it.namespace, it.container, it.image) == about, began_ns)

    def _record(self, operation: wire.Operation) -> None:
        figures = {name: str(value) for name in FIGURES if (value := getattr(operation.result, name))}
        self._containers.record_image(operation.namespace, operation.container, operation.image, **figures)
