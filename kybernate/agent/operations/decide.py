"""What is to be done now about the operations that have not ended. Pure functions of records, sightings and the clock.

`decide` is called after every change and again after each of its actions, so an action is one small thing. An operation
that has begun and whose fate is not known is looked up first; then it is attended again, begun again, rolled back or
ended, by what was seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from kybernate.node.failure import Failure, TimedOut
from kybernate.verbs.errors import fault_of
from kybernate.verbs.model import GPU, SEAT, Cause, Fault, Limits, Observation, Operation, Result, Seen, State

MOST_ATTEMPTS = 3
LOOK_AGAIN_SECONDS = 2.0  # after a look that saw nothing, because what would answer is away


@dataclass(frozen=True)
class Start:
    """Journal that it begins, then carry it out. `again`: it had begun before, and nothing of that is left."""

    operation: Operation
    again: bool = False


@dataclass(frozen=True)
class Attend:
    """Wait for the end of what the shim carries out."""

    operation: Operation
    note: str


@dataclass(frozen=True)
class Observe:
    """Find out what became of it."""

    operation: Operation


@dataclass(frozen=True)
class RollBack:
    """Remove what the agent itself has left half done."""

    operation: Operation


@dataclass(frozen=True)
class Undo:
    """Journal that it is being undone, and why."""

    operation: Operation
    cause: Cause


@dataclass(frozen=True)
class Interrupt:
    """Ask what carries it out to undo it."""

    operation: Operation


@dataclass(frozen=True)
class Finish:
    """Journal its final state."""

    operation: Operation
    state: State
    result: Result | None = None
    fault: Fault | None = None
    note: str = ""


Action = Start | Attend | Observe | RollBack | Undo | Interrupt | Finish


def decide(
    operations: Iterable[Operation], observations: Mapping[str, Observation], limits: Limits, now: float
) -> list[Action]:
    """Return what to do now, in order. `operations` are those that have not ended; `now` is in seconds since 1970.

    `observations` says of an operation that has begun what is known of it; none means that it has to be looked up.
    """
    ordered = sorted(operations, key=lambda operation: operation.number)
    begun = [operation for operation in ordered if operation.state != State.PENDING]
    waiting = [operation for operation in ordered if operation.state == State.PENDING]
    known = (_of_begun(operation, observations.get(operation.id), now) for operation in begun)
    return [*(action for action in known if action), *_of_waiting(waiting, begun, limits, now)]


def next_look(operations: Iterable[Operation], observations: Mapping[str, Observation], now: float) -> float | None:
    """Return in how many seconds time alone gives something to do; None means never."""
    times = [operation.deadline for operation in operations if operation.deadline is not None]
    times += [seen.at + LOOK_AGAIN_SECONDS for seen in observations.values() if seen.seen == Seen.UNREACHABLE]
    return min((time - now for time in times if time > now), default=None)


# ---- those that have begun


def _of_begun(operation: Operation, seen: Observation | None, now: float) -> Action | None:
    if seen is None or (seen.seen == Seen.UNREACHABLE and now >= seen.at + LOOK_AGAIN_SECONDS):
        return Observe(operation)
    if operation.state == State.RUNNING and operation.is_late(now) and seen.seen in (Seen.ATTENDED, Seen.AT_WORK):
        return Undo(operation, "deadline")
    match seen.seen:
        case Seen.ATTENDED:
            return Interrupt(operation) if operation.state == State.CANCELLING and not seen.asked else None
        case Seen.AT_WORK:
            return Attend(operation, seen.note)
        case Seen.HALF_DONE:
            return RollBack(operation)
        case Seen.LOOKING | Seen.UNREACHABLE:
            return None
        case Seen.ABSENT:
            return _of_absent(operation, seen, now)
        case _:
            return verdict(operation, seen)


def _of_absent(operation: Operation, seen: Observation, now: float) -> Action:
    """Begin again what has left nothing behind, unless it is not wanted any more or has failed to end too often."""
    if operation.state == State.CANCELLING:
        return verdict(operation, Observation(Seen.CANCELLED, seen.note))
    if operation.is_late(now):
        return Finish(operation, State.FAILED, fault=_late(operation), note=seen.note)
    if operation.attempts >= MOST_ATTEMPTS:
        error = Failure(
            f"the {operation.verb} was begun {operation.attempts} times, and each time the agent lost sight of it",
            state=seen.note,
            advice="the notes of the operation and the agent's log say what ended it each time",
        )
        return Finish(operation, State.FAILED, fault=fault_of(error), note=seen.note)
    return Start(operation, again=True)


def verdict(operation: Operation, seen: Observation) -> Finish:
    """Return the final state that follows from how an operation ended.

    What could not be stopped any more has succeeded, whatever was wanted meanwhile. What was undone is cancelled, or
    has failed if its deadline is the reason.
    """
    match seen.seen:
        case Seen.SUCCEEDED:
            return Finish(operation, State.SUCCEEDED, result=seen.result or Result(), note=seen.note)
        case Seen.CANCELLED if operation.cause == "deadline":
            return Finish(operation, State.FAILED, fault=_late(operation), note=seen.note)
        case Seen.CANCELLED:
            return Finish(operation, State.CANCELLED, note=seen.note)
        case _:
            fault = seen.fault or Fault("Unexpected", "it failed without an error")
            return Finish(operation, State.FAILED, fault=fault, note=seen.note)


def _late(operation: Operation) -> Fault:
    given = (operation.deadline or operation.created) - operation.created
    began = operation.state != State.PENDING
    where = "it was undone" if began else "it had not begun"
    return fault_of(
        TimedOut(
            f"the {operation.verb} had {given:g} s and did not end in time",
            state=where,
            advice="give it more time, or find out what it waited for: `kybernate ops` shows steps and notes",
        )
    )


# ---- those that wait


def _of_waiting(
    waiting: Iterable[Operation], begun: Iterable[Operation], limits: Limits, now: float
) -> Iterator[Action]:
    """Yield what begins now. Who came first goes first: it is not overtaken by what wants the same as it does."""
    claims = _Claims(limits)
    for operation in begun:
        claims.take(operation)
    for operation in waiting:
        if operation.is_late(now):
            yield Finish(operation, State.FAILED, fault=_late(operation))
        elif claims.begins(operation):
            yield Start(operation)


class _Claims:
    """What is taken: by operations that have begun, and by those that came earlier and still wait."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held: set[str] = set()
        self._shared: set[str] = set()
        self._load: Counter[str] = Counter()
        self._running = 0

    def take(self, operation: Operation) -> None:
        target = operation.target
        self._held.update(target.holds)
        self._shared.update(target.shares)
        self._load.update(target.copies)
        self._running += SEAT not in operation.labels

    def begins(self, operation: Operation) -> bool:
        """Take what the operation needs, and return whether it is free for it now.

        One that waits for a container takes no place among the copies: that may last long.
        """
        target = operation.target
        if self._collides(operation):
            self._held.update(target.holds)
            self._shared.update(target.shares)
            return False
        room = all(self._load[name] < self._most(name) for name in target.copies)
        room = room and (self._running < self._limits.running or SEAT in operation.labels)
        self.take(operation)
        return room

    def _collides(self, operation: Operation) -> bool:
        holds, shares = set(operation.target.holds), set(operation.target.shares)
        return bool(holds & (self._held | self._shared) or shares & self._held)

    def _most(self, name: str) -> int:
        return self._limits.copies_per_gpu if name.startswith(GPU) else self._limits.copies_per_disk
