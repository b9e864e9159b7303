"""The log of events: each is in the journal first, then delivered to all that follow.

One writer takes all events that wait and writes them in one transaction, so that a storm of events costs few writes to
the disk, and their order is that of their ids.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from kybernate.agent.events.store import EventStore
from kybernate.agent.journal import JournalUnusable
from kybernate.messages import agent_pb2 as api

if TYPE_CHECKING:
    from kybernate_shim.logs import Log

Level = Literal["info", "warning", "error"]
Sink = Callable[[api.Event], object]


class EventLog:
    """Records events. `sinks` get each event once it is in the journal, in order: the hub's `put`, hooks, containerd.

    A sink must neither block nor raise.
    """

    def __init__(
        self, store: EventStore, sinks: Sequence[Sink], log: Log, *, now_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._store = store
        self._sinks = sinks
        self._log = log
        self._now_ns = now_ns
        self._waiting: list[tuple[api.Event, asyncio.Future[api.Event]]] = []
        self._writer: asyncio.Task[None] | None = None

    async def record(self, type: str, level: Level, message: str, **about: Any) -> api.Event:
        """Write an event to the journal, deliver it, and return it with its id.

        `type` is noun.past-participle. `about` may have container, namespace (containerd's), operation and image; what
        else it has becomes the event's fields, as texts. A caller that is cancelled does not take the event back.
        Raises JournalUnusable; there is no event then.
        """
        return await self._queue(made(type, level, message, **about))

    def note(self, type: str, level: Level, message: str, **about: Any) -> None:
        """Record an event without waiting for the disk; the agent's log says if it is lost. `about` as for `record`."""
        written = self._queue(made(type, level, message, **about))
        written.add_done_callback(lambda done: done.cancelled() or done.exception())  # the writer has logged it

    async def since(self, id: int) -> list[api.Event]:
        """Return all kept events after `id`, oldest first."""
        found: list[api.Event] = []
        last = await self._store.last()
        while page := await self._store.between(found[-1].id if found else id, last):
            found += page
        return found

    async def close(self) -> None:
        """Wait until everything is written."""
        while self._writer is not None and not self._writer.done():
            await asyncio.wait({self._writer})

    def _queue(self, event: api.Event) -> asyncio.Future[api.Event]:
        event.time.FromNanoseconds(self._now_ns())
        written: asyncio.Future[api.Event] = asyncio.get_running_loop().create_future()
        self._waiting.append((event, written))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write())
        return written

    async def _write(self) -> None:
        while self._waiting:
            taken, self._waiting = self._waiting, []
            try:
                await self._store.append([event for event, _ in taken])
            except JournalUnusable as error:
                self._refuse(taken, error)
            else:
                self._deliver(taken)

    def _deliver(self, taken: Sequence[tuple[api.Event, asyncio.Future[api.Event]]]) -> None:
        for event, written in taken:
            getattr(self._log, event.level)(event.type, **_line(event))
            for sink in self._sinks:
                sink(event)
            if not written.done():
                written.set_result(event)

    def _refuse(self, taken: Sequence[tuple[api.Event, asyncio.Future[api.Event]]], error: JournalUnusable) -> None:
        for event, written in taken:
            self._log.error("event.not_recorded", type=event.type, error=str(error), **_line(event))
            if not written.done():
                written.set_exception(error)


def made(
    type: str,
    level: Level,
    message: str,
    *,
    container: str = "",
    namespace: str = "",
    operation: str = "",
    image: str = "",
    **fields: Any,
) -> api.Event:
    """Return an event without id and time."""
    event = api.Event(type=type, level=level, message=message, container=container, namespace=namespace)
    event.operation, event.image = operation, image
    event.fields.update({name: str(value) for name, value in fields.items()})
    return event


def _line(event: api.Event) -> dict[str, object]:
    """Return the fields of the agent's line of log for an event."""
    named = {name: getattr(event, name) for name in ("id", "container", "namespace", "operation", "image", "message")}
    return {**{f"field_{name}": value for name, value in event.fields.items()}, **{k: v for k, v in named.items() if v}}
