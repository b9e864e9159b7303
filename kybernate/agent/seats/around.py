"""The node around the arbiter: what it reads, and what it acts by. Interfaces; the part of seats has the real ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kybernate.agent.inventory.gpus import Sight
from kybernate.agent.room import Note
from kybernate.agent.seats.acting import Outcome
from kybernate.agent.seats.claims import Claim, Key
from kybernate.messages import agent_pb2 as wire
from kybernate.seats.model import NEVER, Seat, Turn
from kybernate.verbs.room import Taker


class Containers(Protocol):
    """What the inventory knows."""

    def claims(self) -> Mapping[Key, Claim]: ...
    def touch(self, namespace: str, id: str) -> None: ...
    def is_gone(self, namespace: str, id: str) -> bool: ...
    async def looked_at(self, namespace: str, id: str) -> bool: ...


class Acts(Protocol):
    """Carries actions out; see acting.py."""

    async def wake(self, seat: str, key: Key) -> Outcome: ...
    async def suspend(self, seat: str, key: Key, *, again: bool = False) -> Outcome: ...
    async def swap(self, seat: str, out: Key, key: Key, *, again: bool = False) -> Outcome: ...
    async def park(self, seat: str, key: Key) -> Outcome: ...
    async def ended(self, operation: str) -> Outcome: ...
    async def cancel(self, operation: str) -> None: ...


Active = Callable[[], Mapping[Key, frozenset[int]]]  # containers, and which of their processes hold memory of GPUs


class UseWatcher(Protocol):
    """Finds out which suspended containers use CUDA.

    The arbiter takes a use as a request with the cause "use", unless the container's annotation
    `kybernate.io/wake-on-use` is "false", and counts of calls as work.
    """

    async def run(self, suspended: Callable[[], Collection[Key]], used: Callable[[Key], None], active: Active) -> None:
        """Watch until cancelled; raises no expected error.

        `suspended` returns the containers of which a use is a request now. `used` gets one within 100 ms of its first
        call that waits in the driver; again, at most once a second, for as long as it waits. `active` returns the
        containers whose calls are counted, with those of their processes that hold memory of GPUs. All are called on
        the event loop's thread and never block.
        """

    def calls(self, container: Key) -> int | None:
        """Return a number that rises with calls of a container that count as work, None where that is not known."""


class NoUse:
    """Sees nothing: containers wake on request alone."""

    async def run(self, suspended: Callable[[], Collection[Key]], used: Callable[[Key], None], active: Active) -> None:
        await asyncio.Event().wait()

    def calls(self, container: Key) -> int | None:
        return None


@dataclass(frozen=True)
class Around:
    """The node around the arbiter. None of these blocks.

    `container` returns what the inventory has of one. `look` asks the driver now. `waiting` are those that wait for
    room, `taking` those that have been let in and take it now; `look_again` has those that wait ask again. `label`
    keeps a container's seat in containerd. `publish` gets a seat, its container, its turn, its error, and whether it is
    crowded. `priority` is that of a container's pod, None where none is known.
    """

    containers: Containers
    container: Callable[[Key], wire.Container | None]
    look: Callable[[], Awaitable[Sight | None]]
    waiting: Callable[[], Sequence[Taker]]
    taking: Callable[[], Sequence[Taker]]
    look_again: Callable[[], None]
    acts: Acts
    note: Note
    publish: Callable[[Seat, Key | None, Turn | None, str, bool], object]
    free_memory: Callable[[], tuple[int, int]]  # the host's, and what of that is the arena's
    label: Callable[[Key, str], Coroutine[Any, Any, None]]
    priority: Callable[[wire.Container], int | None]
    wish: Callable[[wire.Container], str] = lambda container: ""  # its pod's annotation: a new value asks for its seat
    asked: Callable[[str], float] = lambda operation: NEVER  # when an operation was asked for
    is_own: Callable[[str], bool] = lambda operation: False  # an operation that the arbiter has begun
    leaves: Callable[[str], Key | None] = lambda operation: None  # the container that leaves in another caller's swap
    show_turns: Callable[[Mapping[Key, bool]], object] = lambda turns: None  # whether programs may begin with CUDA
    kubelets: Callable[[], Iterable[str]] = tuple  # seats that kubelet has given out
    clock: Callable[[], float] = time.time
