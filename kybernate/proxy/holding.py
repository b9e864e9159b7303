"""Who waits for a model, and when it wakes, is drained and suspended: state, and `decide(state, now) -> actions`.

`decide` changes nothing. The engine carries out its actions, and applies each to the state by the functions below,
which are the only ones that change it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush
from math import inf

from kybernate.proxy.api_errors import Refusal
from kybernate.proxy.settings import Model


class Phase(StrEnum):
    """Where a model is between sleep and work.

    draining: new requests wait, those in flight end; it is undone by any that waits, unless the model makes way.
    suspending cannot be undone: a request that arrives then waits, and wakes the model afterwards.
    """

    ASLEEP = "asleep"
    WAKING = "waking"
    AWAKE = "awake"
    DRAINING = "draining"
    SUSPENDING = "suspending"
    ABSENT = "absent"  # there is no such container; it may be parked, or have an image


@dataclass(frozen=True)
class Ticket:
    """A request that waits. Times are of one clock that never goes back."""

    id: int
    bytes: int
    arrived: float
    deadline: float


@dataclass
class Held:
    """A model, those that wait for it and those that it has.

    `elsewhere` is in flight in another data plane, which has the same `concurrency` and through which those of this one
    go as well: so it counts for activity, and not against the room for more.
    """

    model: Model
    phase: Phase = Phase.ASLEEP
    waiting: dict[int, Ticket] = field(default_factory=dict)  # in their order of arrival
    bytes: int = 0
    in_flight: int = 0
    elsewhere: int = 0
    running: int = 0  # of those elsewhere, at the model itself: the rest waits in the other plane's queue
    limited: int | None = None  # what the other plane keeps to; `running` is as it was then, or later
    granted: int | None = None  # of `concurrency`, where other proxies share it; None where none does
    busy_until: float = -inf  # when it was last seen at work
    drain_began: float = 0.0
    closed: bool = False  # no other plane passes requests to it
    suspend_wanted: bool = False  # by an operator or the agent, however busy it was lately
    makes_way: bool = False  # for another model: what arrives waits until this one was suspended
    retry_at: float = -inf  # after a wake that failed
    failure: str = ""
    deadlines: list[tuple[float, int]] = field(default_factory=list)  # a heap of those that wait, and of some that did

    @property
    def first_deadline(self) -> float:
        return self.deadlines[0][0] if self.deadlines else inf


@dataclass(frozen=True)
class Release:
    """Pass a request on."""

    id: int


@dataclass(frozen=True)
class Refuse:
    """Answer a request that waited."""

    id: int
    refusal: Refusal


@dataclass(frozen=True)
class Wake:
    """Wake the model."""


@dataclass(frozen=True)
class Drain:
    """Have no data plane pass requests on."""


@dataclass(frozen=True)
class Reopen:
    """Undo a drain. `given_up`: what is in flight took too long, and a suspend that was wanted is wanted no more."""

    given_up: bool


@dataclass(frozen=True)
class Suspend:
    """Suspend the model, which has nothing in flight."""


Action = Release | Refuse | Wake | Drain | Reopen | Suspend


def offer(state: Held, ticket: Ticket, now: float) -> Refusal | None:
    """Return why a request cannot even wait, or None."""
    queue, name = state.model.queue, state.model.name
    if state.phase == Phase.ABSENT and now < state.retry_at:
        return Refusal(503, "model_absent", _absent(state), state.retry_at - now)
    if state.phase == Phase.ASLEEP and now < state.retry_at:
        return Refusal(503, "wake_failed", f"{name} could not be woken: {state.failure}", state.retry_at - now)
    if can_pass(state):
        return None
    if len(state.waiting) >= queue.count or state.bytes + ticket.bytes > queue.bytes:
        words = f"{len(state.waiting)} requests with {state.bytes} bytes wait for {name}, which is as many as may"
        return Refusal(503, "queue_full", words, state.model.retry_after)
    return None


def can_pass(state: Held) -> bool:
    """Return whether a request that arrives now need not wait."""
    return state.phase == Phase.AWAKE and not state.waiting and _room(state) > 0


def decide(state: Held, now: float) -> list[Action]:
    """Return what has to be done now."""
    actions: list[Action] = _expired(state, now)
    gone = {one.id for one in actions if isinstance(one, Refuse)}
    waiting = len(state.waiting) - len(gone)
    match state.phase:
        case Phase.AWAKE if waiting and not state.makes_way:
            actions += _released(state, gone)
        case Phase.AWAKE if state.suspend_wanted or _idle_at(state) <= now:
            actions.append(Drain())
        case Phase.DRAINING if waiting and not state.makes_way:
            actions.append(Reopen(given_up=False))
        case Phase.DRAINING if state.closed and not state.in_flight and not state.elsewhere:
            actions.append(Suspend())
        case Phase.DRAINING if now - state.drain_began >= state.model.drain:
            actions.append(Reopen(given_up=True))
        case Phase.ASLEEP | Phase.ABSENT if now < state.retry_at:
            actions += _refused(state, gone, now)
        case Phase.ASLEEP | Phase.ABSENT if waiting or state.in_flight or state.elsewhere:
            actions.append(Wake())  # something else has suspended it, or it may be parked, or have an image
    return actions


def next_time(state: Held) -> float:
    """Return when `decide` has something to do even if nothing happens; infinity for never."""
    times = [state.first_deadline]
    if state.phase == Phase.AWAKE and not state.waiting:
        times.append(_idle_at(state))
    if state.phase in (Phase.ASLEEP, Phase.ABSENT) and (state.in_flight or state.elsewhere):
        times.append(state.retry_at)
    if state.phase == Phase.DRAINING:
        times.append(state.drain_began + state.model.drain)
    return min(times)


def _idle_at(state: Held) -> float:
    if not state.model.idle or not state.model.container or state.in_flight or state.elsewhere:
        return inf
    return state.busy_until + state.model.idle


def _room(state: Held) -> float:
    return limit_of(state) - state.in_flight


def limit_of(state: Held) -> float:
    """Return how many requests the model may have from here at one time, infinity without a limit."""
    if not state.model.concurrency:
        return inf
    return state.model.concurrency if state.granted is None else min(state.granted, state.model.concurrency)


def _expired(state: Held, now: float) -> list[Action]:
    """Refuse those whose deadline has passed: the top of the heap, as far as it has passed."""
    found: list[Action] = []
    at = [0] if state.deadlines else []
    while at:
        index = at.pop()
        deadline, id = state.deadlines[index]
        if deadline > now:
            continue
        at += [inner for inner in (2 * index + 1, 2 * index + 2) if inner < len(state.deadlines)]
        if ticket := state.waiting.get(id):
            waited = f"{state.model.name} did not take the request in {now - ticket.arrived:.1f} s"
            found.append(Refuse(id, Refusal(504, "deadline", waited)))
    return found


def _released(state: Held, gone: set[int]) -> list[Action]:
    room, found = _room(state), list[Action]()
    for id in state.waiting:
        if len(found) >= room:
            break
        if id not in gone:
            found.append(Release(id))
    return found


def _refused(state: Held, gone: set[int], now: float) -> list[Action]:
    name, after = state.model.name, max(state.retry_at - now, state.model.retry_after)
    refusal = (
        Refusal(503, "model_absent", _absent(state), after)
        if state.phase == Phase.ABSENT
        else Refusal(503, "wake_failed", f"{name} could not be woken: {state.failure}", after)
    )
    return [Refuse(id, refusal) for id in state.waiting if id not in gone]


def _absent(state: Held) -> str:
    return f"the container of {state.model.name} does not exist, and could not be made: {state.failure}"


# ---- what happens to the state


def arrived(state: Held, ticket: Ticket) -> None:
    """A request waits."""
    state.waiting[ticket.id] = ticket
    state.bytes += ticket.bytes
    if ticket.deadline < inf:
        heappush(state.deadlines, (ticket.deadline, ticket.id))


def left(state: Held, id: int) -> None:
    """A request waits no more: it was released or refused, or its client is gone."""
    ticket = state.waiting.pop(id, None)
    if ticket is None:
        return
    state.bytes -= ticket.bytes
    while state.deadlines and state.deadlines[0][1] not in state.waiting:
        heappop(state.deadlines)


def began(state: Held, now: float) -> None:
    """A request was passed on."""
    state.in_flight += 1
    state.busy_until = now


def ended(state: Held, now: float) -> None:
    """A request that was passed on has ended."""
    state.in_flight -= 1
    state.busy_until = now


def used(state: Held, now: float) -> None:
    """The model was at work, by another proxy's requests or on a GPU."""
    state.busy_until = now


def moved(state: Held, phase: Phase, now: float) -> None:
    """The model is in another phase."""
    if {state.phase, phase} == {Phase.ABSENT, Phase.ASLEEP}:
        state.failure, state.retry_at = "", -inf  # what failed was to make it, or to wake one that is gone
    if phase in (Phase.AWAKE, Phase.DRAINING):
        state.drain_began = now
    if phase == Phase.AWAKE:
        state.busy_until = now
        state.failure, state.retry_at = "", -inf
        state.closed = False
    if phase in (Phase.ASLEEP, Phase.ABSENT, Phase.SUSPENDING):
        state.suspend_wanted = state.makes_way = False
    state.phase = phase


def wake_failed(state: Held, reason: str, now: float, *, absent: bool = False) -> None:
    """A wake has failed: those that wait are refused, and the next one is tried after a pause."""
    moved(state, Phase.ABSENT if absent else Phase.ASLEEP, now)
    state.failure, state.retry_at = reason, now + state.model.retry_after
