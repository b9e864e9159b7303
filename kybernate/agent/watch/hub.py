"""The hub: all that the agent knows now, and a stream of its changes for each client that wants to follow.

A client names the last revision that it has seen. Where the log in memory still has all changes since, it gets those.
Else it gets a snapshot: all objects between two bookmarks, then the events that it has missed, from the journal. Until
the snapshot and those events are complete, messages carry the revision that the client came with, or that of the event,
so that a client that breaks off in the middle and comes back gets the rest, and no event twice.

All methods are called on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.message import Message

from kybernate.messages import agent_pb2 as api
from kybernate.node.failure import Invalid

MOST_ENTRIES = 4096
MOST_BYTES = 4 << 20


class History(Protocol):
    """The durable events."""

    @property
    def began(self) -> int:
        """The id of the event that this run of the agent has begun with."""

    async def between(self, after: int, until: int) -> Sequence[api.Event]:
        """Return the oldest events with `after` < id <= `until`, some of them at a time; none where there are none."""


class Hub:
    """What is known now, by kind and key. A message that was put is a copy: its owner may change his."""

    def __init__(
        self,
        history: History,
        *,
        instance: str = "",
        most_entries: int = MOST_ENTRIES,
        most_bytes: int = MOST_BYTES,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.instance = instance or uuid.uuid4().hex
        self.revision = of_event(history.began)
        self._history = history
        self._now_ns = now_ns
        self._log = ChangeLog(self.revision, most_entries=most_entries, most_bytes=most_bytes)
        self._objects: dict[tuple[str, str], Entry] = {}
        self._followers: dict[asyncio.Event, frozenset[str]] = {}
        self._closed = False

    # -- what there is ------------------------------------------------------------------------------------------------

    def put(self, message: Message) -> bool:
        """Add or replace an object, or deliver an event; return whether that is a change.

        Events come in the order of their ids, and are kept by the journal alone.
        """
        kind, key = identity(message)
        if isinstance(message, api.Event):
            self._append(kind, message, of_event(message.id))
            return True
        there = self._objects.get((kind, key))
        if there is not None and there.message == message:
            return False
        self._objects[kind, key] = self._append(kind, message, self.revision + 1)
        return True

    def remove(self, message: Message) -> bool:
        """Remove the object that `message` is about; only its key is looked at. Return whether it was there."""
        there = self._objects.pop(identity(message), None)
        if there is None:
            return False
        self._append(there.kind, there.message, self.revision + 1, removed=True)
        return True

    def get(self, kind: str, key: str) -> Any:
        """Return the object of a kind by its key, see `identity`; None where there is none. It must not be changed."""
        there = self._objects.get((kind, key))
        return there.message if there is not None else None

    def objects(self, kind: str) -> list[Any]:
        """Return the objects of a kind, those first that have not changed the longest. They must not be changed."""
        return [entry.message for entry in self._objects.values() if entry.kind == kind]

    def wanted(self, kind: str) -> bool:
        """Return whether a client follows objects of this kind."""
        return any(kind in kinds for kinds in self._followers.values())

    def _append(self, kind: str, message: Message, revision: int, *, removed: bool = False) -> Entry:
        assert revision > self.revision, f"{kind} has revision {revision} after {self.revision}"
        copy = type(message)()
        copy.CopyFrom(message)
        entry = Entry(revision, kind, copy, self._now_ns(), removed)
        self.revision = revision
        self._log.append(entry)
        for wake in self._followers:
            wake.set()
        return entry

    # -- following ----------------------------------------------------------------------------------------------------

    async def subscribe(
        self, revision: int = 0, instance: str = "", kinds: Collection[str] = ()
    ) -> AsyncGenerator[api.Change, None]:
        """Yield every change after `revision`, see the module, until `close`.

        `instance` is that of the agent that gave the revision, empty where unknown; `kinds` limits what is delivered.
        The iterator has to be closed by `aclosing`. Raises Invalid.
        """
        wanted = wanted_kinds(kinds)
        position = self._log.after(revision) if self._is_own(revision, instance) else None
        seen = revision if position is not None or revision < self._log.floor else 0
        with self._following(wanted) as wake:
            while not self._closed:
                wake.clear()
                if position is None or position < self._log.first:
                    position = self._log.end
                    async for change in self._snapshot(seen, wanted):
                        seen = change.revision
                        yield change
                elif (entry := self._log.at(position)) is None:
                    await wake.wait()
                else:
                    position += 1
                    if entry.kind in wanted:
                        seen = entry.revision
                        yield self._change(entry, entry.revision)

    def close(self) -> None:
        """End all subscriptions."""
        self._closed = True
        for wake in self._followers:
            wake.set()

    def _is_own(self, revision: int, instance: str) -> bool:
        """Return whether this run may have given the revision; 0 is none that was given."""
        return instance in ("", self.instance) and 0 < revision <= self.revision

    async def _snapshot(self, seen: int, wanted: frozenset[str]) -> AsyncGenerator[api.Change, None]:
        """Yield all objects as they are now, and the events after `seen` until now."""
        now, objects = self.revision, [entry for entry in self._objects.values() if entry.kind in wanted]
        yield self._bookmark(api.BOOKMARK_SNAPSHOT_BEGIN, seen)
        for entry in objects:
            yield self._change(entry, seen)
        after, until = last_event(seen), last_event(now) if "event" in wanted else 0
        missed = await self._history.between(after, until)
        yield self._bookmark(api.BOOKMARK_SNAPSHOT_END, seen if missed else now)
        while missed:
            after = missed[-1].id
            following = await self._history.between(after, until)
            for event in missed:
                complete = not following and event.id == after
                entry = Entry(of_event(event.id), "event", event, event.time.ToNanoseconds())
                yield self._change(entry, now if complete else entry.revision)
            missed = following

    def _change(self, entry: Entry, revision: int) -> api.Change:
        change = api.Change(revision=revision, instance=self.instance, removed=entry.removed)
        change.time.FromNanoseconds(entry.time_ns)
        getattr(change, entry.kind).CopyFrom(entry.message)
        return change

    def _bookmark(self, bookmark: api.Bookmark, revision: int) -> api.Change:
        change = api.Change(revision=revision, instance=self.instance, bookmark=bookmark)
        change.time.FromNanoseconds(self._now_ns())
        return change

    @contextmanager
    def _following(self, kinds: frozenset[str]) -> Iterator[asyncio.Event]:
        wake = asyncio.Event()
        self._followers[wake] = kinds
        try:
            yield wake
        finally:
            del self._followers[wake]


def wanted_kinds(kinds: Collection[str]) -> frozenset[str]:
    """Return the kinds that a client wants, all where it names none. Raises Invalid."""
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise Invalid(f"there are no objects of the kind {', '.join(unknown)}; there are {', '.join(KINDS)}")
    return frozenset(kinds or KINDS)


KEYS: dict[type[Message], tuple[str, Callable[[Any], str]]] = {
    api.Container: ("container", lambda one: f"{one.namespace}/{one.id}"),
    api.Gpu: ("gpu", lambda one: one.uuid),
    api.Operation: ("operation", lambda one: one.id),
    api.Image: ("image", lambda one: one.id or one.name),
    api.Tier: ("tier", lambda one: one.name),
    api.Seat: ("seat", lambda one: one.name),
    api.Event: ("event", lambda one: str(one.id)),
}
KINDS = tuple(kind for kind, _ in KEYS.values())  # also the names of the fields of a Change


def identity(message: Message) -> tuple[str, str]:
    """Return kind and key of a message. Raises TypeError for one that is not an object."""
    try:
        kind, key = KEYS[type(message)]
    except KeyError:
        raise TypeError(f"{type(message).__name__} is not one of {', '.join(KINDS)}") from None
    return kind, key(message)


ENTRY_BYTES = 200  # that an entry takes besides its message


@dataclass(frozen=True, slots=True)
class Entry:
    """One change. The message is never changed once it is here."""

    revision: int
    kind: str
    message: Message
    time_ns: int
    removed: bool = False


class ChangeLog:
    """Entries in the order of their revisions; positions count from 0, and are never used twice."""

    def __init__(self, floor: int, *, most_entries: int = MOST_ENTRIES, most_bytes: int = MOST_BYTES) -> None:
        """`floor` is the revision before the first change."""
        self.floor = floor
        self.first = 0
        self._most_entries, self._most_bytes = most_entries, most_bytes
        self._entries: deque[Entry] = deque()
        self._bytes = 0

    @property
    def end(self) -> int:
        """The position of the next change."""
        return self.first + len(self._entries)

    def append(self, entry: Entry) -> None:
        """Add a change, and drop the oldest ones that there is no room for any more."""
        self._entries.append(entry)
        self._bytes += _size(entry)
        while len(self._entries) > self._most_entries or (self._bytes > self._most_bytes and len(self._entries) > 1):
            dropped = self._entries.popleft()
            self._bytes -= _size(dropped)
            self.floor = dropped.revision
            self.first += 1

    def at(self, position: int) -> Entry | None:
        """Return the change at a position that is not before `first`; None at the end."""
        return self._entries[position - self.first] if position < self.end else None

    def after(self, revision: int) -> int | None:
        """Return the position of the first change after `revision`; None where some of them are gone."""
        if revision < self.floor:
            return None
        return self.first + bisect_right(self._entries, revision, key=lambda entry: entry.revision)


def _size(entry: Entry) -> int:
    return entry.message.ByteSize() + ENTRY_BYTES


COUNT_BITS = 32


def of_event(id: int) -> int:
    """Return the revision of the change that delivers event `id`."""
    return id << COUNT_BITS


def last_event(revision: int) -> int:
    """Return the id of the last event that the holder of a revision has seen; 0 where there is none."""
    return revision >> COUNT_BITS
