"""Room on the node's GPUs, with one owner: shims ask it before a container starts, verbs before they take memory.

Who may take room is a decision that is passed in (`Grant`): seats have one, and without it all takers are let in. What
waits is known here, in the order in which it came, and is shown: in the operation's progress, in events, and of the
container.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

from kybernate.verbs.room import Taker, Waiting

LOOK_SECONDS: Final = 1.0  # between two decisions, where nothing has said before that things have changed


class Grant(Protocol):
    """Decides about one taker. Pure: it is asked again until it lets the taker in."""

    def __call__(self, taker: Taker, before: Sequence[Taker]) -> str:
        """Return why the taker has to wait, in words; "" lets it in.

        `before` are those that take memory at present, and those that wait and came earlier.
        """


class Note(Protocol):
    """Records a durable event without waiting for it."""

    def __call__(self, type: str, level: str, message: str, /, **about: str) -> object: ...


class Seated(Protocol):
    """Says which containers have a seat, and so wait for their own turn when they start."""

    def __call__(self, namespace: str, container: str) -> bool: ...


def without_seat(namespace: str, container: str) -> bool:
    """Say so of every container: there are no seats."""
    return False


def let_in(taker: Taker, before: Sequence[Taker]) -> str:
    """Let every taker in: the driver refuses what does not fit."""
    return ""


@dataclass
class RoomOwner:
    """Grants room; see Room. `waits` gets each taker and what it waits for, "" when it waits no longer."""

    note: Note
    waits: Callable[[Taker, str], object] = lambda taker, reason: None
    grant: Grant = let_in
    seated: Seated = without_seat
    _waiting: list[Taker] = field(default_factory=list)
    _taking: list[Taker] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def waiting(self) -> Sequence[Taker]:
        """Return who waits, in the order in which they came."""
        return tuple(self._waiting)

    @property
    def taking(self) -> Sequence[Taker]:
        """Return who has been let in, and takes memory at present."""
        return tuple(self._taking)

    def look_again(self) -> None:
        """Decide again about all that wait: memory has been freed, or rules have changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def taken(self, taker: Taker, waiting: Waiting) -> AsyncIterator[None]:
        """Wait for room, and hold the place while the block takes it; see Room."""
        self._waiting.append(taker)
        reason = ""
        try:
            while found := self._reason(taker):
                if found != reason:
                    waiting(found)
                    self.waits(taker, found)
                if not reason:
                    self._note("room.awaited", taker, f"waits for room on a GPU: {found}")
                reason = found
                changed = self._changed
                try:
                    async with asyncio.timeout(LOOK_SECONDS):
                        await changed.wait()
                except TimeoutError:
                    pass
            self._taking.append(taker)
        finally:
            self._waiting.remove(taker)
            if reason:
                self.waits(taker, "")
        try:
            if reason:
                self._note("room.granted", taker, "has room on its GPUs")
            yield
        finally:
            self._taking.remove(taker)
            self.look_again()

    def _reason(self, taker: Taker) -> str:
        """Return why a taker waits. A shim that starts what an operation restores has the operation's room.

        A container with a seat has it only once its seat's turn has come: the operation may know nothing of the seat.
        """
        seated = self.seated(taker.namespace, taker.container)
        if not seated and any(
            (one.namespace, one.container) == (taker.namespace, taker.container) for one in self._taking
        ):
            return ""
        return self.grant(taker, (*self._taking, *self._waiting[: self._waiting.index(taker)]))

    def _note(self, type: str, taker: Taker, message: str) -> None:
        about = {"namespace": taker.namespace, "container": taker.container, "operation": taker.operation}
        self.note(type, "info", f"container {taker.container} {message}", **about)
