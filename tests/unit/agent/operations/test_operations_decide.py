"""What is decided about operations: the order of starts, limits, deadlines, recovery and verdicts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.agent.operations.decide import (
    LOOK_AGAIN_SECONDS,
    MOST_ATTEMPTS,
    Action,
    Attend,
    Finish,
    Interrupt,
    Observe,
    RollBack,
    Start,
    Undo,
    decide,
    next_look,
    verdict,
)
from kybernate.verbs.model import Cause, Fault, Limits, Observation, Operation, Result, Seen, State, Target
from kybernate.verbs.suspend import Suspend

NOW = 1000.0
FAULT = Fault("Broken", "it broke")


def operation(
    number: int,
    *holds: str,
    state: State = State.PENDING,
    shares: tuple[str, ...] = (),
    copies: tuple[str, ...] = (),
    deadline: float | None = None,
    cause: Cause = "",
    attempts: int = 1,
) -> Operation:
    return Operation(
        id=f"op{number}",
        arguments=Suspend("a"),
        target=Target(holds=holds, shares=shares, copies=copies),
        created=NOW - 10,
        number=number,
        state=state,
        deadline=deadline,
        cause=cause,
        attempts=attempts,
    )


def started(*operations: Operation, limits: Limits | None = None) -> list[str]:
    """Return the ids of those that begin now; those that have begun are attended."""
    seen = {one.id: Observation(Seen.ATTENDED) for one in operations if one.state != State.PENDING}
    actions = decide(operations, seen, limits or Limits(), NOW)
    return [action.operation.id for action in actions if isinstance(action, Start)]


def test_operations_of_one_container_begin_one_by_one_in_order() -> None:
    assert started(operation(2, "a"), operation(1, "a"), operation(3, "a")) == ["op1"]
    assert started(operation(1, "a", state=State.RUNNING), operation(2, "a")) == []
    assert started(operation(1, "a", state=State.CANCELLING), operation(2, "a")) == []


def test_operations_of_several_containers_begin_together() -> None:
    assert started(operation(1, "a"), operation(2, "b"), operation(3, "c")) == ["op1", "op2", "op3"]


def test_swap_waits_for_both_containers_and_is_not_overtaken() -> None:
    swap = operation(2, "a", "b")
    assert started(operation(1, "a", state=State.RUNNING), swap, operation(3, "b"), operation(4, "c")) == ["op4"]
    assert started(swap, operation(3, "b")) == ["op2"]


def test_image_is_shared_by_readers_and_not_with_a_delete() -> None:
    readers = [operation(number, f"c{number}", shares=("image",)) for number in (1, 2)]
    assert started(*readers, operation(3, "image"), operation(4, "d", shares=("image",))) == ["op1", "op2"]
    assert started(operation(1, "image", state=State.RUNNING), *readers[1:]) == []


def test_copies_of_a_gpu_and_of_a_disk_have_limits_of_their_own() -> None:
    limits = Limits(copies_per_gpu=1, copies_per_disk=2)
    on = [operation(number, f"c{number}", copies=("gpu 1", "disk 8:0")) for number in (1, 2)]
    others = [operation(3, "c3", copies=("disk 8:0",)), operation(4, "c4", copies=("gpu 2", "disk 9:0"))]
    assert started(*on, *others, limits=limits) == ["op1", "op4"]


def test_one_that_waits_for_room_keeps_its_place_and_one_that_waits_for_a_container_takes_none() -> None:
    limits = Limits(copies_per_gpu=1)
    waits_for_container = operation(2, "a", copies=("gpu 2",))
    running = operation(1, "a", state=State.RUNNING, copies=("gpu 1",))
    assert started(running, waits_for_container, operation(3, "b", copies=("gpu 2",)), limits=limits) == ["op3"]
    waits_for_room = operation(2, "b", copies=("gpu 1", "gpu 2"))
    assert started(running, waits_for_room, operation(3, "c", copies=("gpu 2",)), limits=limits) == []


def test_only_so_many_run_on_the_node() -> None:
    many = [operation(number, f"c{number}") for number in range(5)]
    assert len(started(*many, limits=Limits(running=3))) == 3


def test_pending_operation_fails_at_its_deadline_and_frees_its_place() -> None:
    late = operation(1, "a", deadline=NOW)
    actions = decide([late, operation(2, "a")], {}, Limits(), NOW)
    assert [type(action) for action in actions] == [Finish, Start]
    assert isinstance(actions[0], Finish)
    assert actions[0].state == State.FAILED
    assert actions[0].fault is not None
    assert actions[0].fault.type == "TimedOut"
    assert actions[0].fault.state == "it had not begun"


RUNNING = operation(1, "a", state=State.RUNNING)
LATE = replace(RUNNING, deadline=NOW - 1)
UNDONE = replace(RUNNING, state=State.CANCELLING, cause="requested")
TOO_OFTEN = replace(RUNNING, attempts=MOST_ATTEMPTS)
CASES: list[tuple[Operation, Observation | None, Action | None]] = [
    (RUNNING, None, Observe(RUNNING)),
    (RUNNING, Observation(Seen.LOOKING), None),
    (RUNNING, Observation(Seen.UNREACHABLE, at=NOW), None),
    (RUNNING, Observation(Seen.UNREACHABLE, at=NOW - LOOK_AGAIN_SECONDS), Observe(RUNNING)),
    (RUNNING, Observation(Seen.ATTENDED), None),
    (LATE, Observation(Seen.ATTENDED), Undo(LATE, "deadline")),
    (LATE, Observation(Seen.AT_WORK), Undo(LATE, "deadline")),
    (LATE, Observation(Seen.LOOKING), None),
    (UNDONE, Observation(Seen.ATTENDED), Interrupt(UNDONE)),
    (UNDONE, Observation(Seen.ATTENDED, asked=True), None),
    (UNDONE, Observation(Seen.AT_WORK, "busy"), Attend(UNDONE, "busy")),
    (RUNNING, Observation(Seen.AT_WORK, "busy"), Attend(RUNNING, "busy")),
    (RUNNING, Observation(Seen.HALF_DONE), RollBack(RUNNING)),
    (UNDONE, Observation(Seen.HALF_DONE), RollBack(UNDONE)),
    (RUNNING, Observation(Seen.ABSENT), Start(RUNNING, again=True)),
    (UNDONE, Observation(Seen.ABSENT, "none"), Finish(UNDONE, State.CANCELLED, note="none")),
    (RUNNING, Observation(Seen.SUCCEEDED), Finish(RUNNING, State.SUCCEEDED, result=Result())),
    (UNDONE, Observation(Seen.SUCCEEDED), Finish(UNDONE, State.SUCCEEDED, result=Result())),
    (RUNNING, Observation(Seen.FAILED, fault=FAULT), Finish(RUNNING, State.FAILED, fault=FAULT)),
    (UNDONE, Observation(Seen.FAILED, fault=FAULT), Finish(UNDONE, State.FAILED, fault=FAULT)),
    (UNDONE, Observation(Seen.CANCELLED), Finish(UNDONE, State.CANCELLED)),
    (RUNNING, Observation(Seen.CANCELLED, "by another"), Finish(RUNNING, State.CANCELLED, note="by another")),
]


@pytest.mark.parametrize(("one", "seen", "expected"), CASES)
def test_operation_that_has_begun(one: Operation, seen: Observation | None, expected: Action | None) -> None:
    actions = decide([one], {one.id: seen} if seen else {}, Limits(), NOW)
    assert actions == ([expected] if expected else [])


@pytest.mark.parametrize(("one", "type"), [(LATE, "TimedOut"), (TOO_OFTEN, "Failure")])
def test_operation_that_left_nothing_is_not_begun_again_without_end(one: Operation, type: str) -> None:
    (action,) = decide([one], {one.id: Observation(Seen.ABSENT)}, Limits(), NOW)
    assert isinstance(action, Finish)
    assert action.fault is not None
    assert (action.state, action.fault.type) == (State.FAILED, type)


def test_what_was_undone_for_its_deadline_has_failed() -> None:
    late = replace(LATE, state=State.CANCELLING, cause="deadline")
    action = verdict(late, Observation(Seen.CANCELLED))
    assert action.fault is not None
    assert (action.state, action.fault.type) == (State.FAILED, "TimedOut")


def test_next_look_is_the_next_deadline_or_the_next_look_at_what_was_away() -> None:
    later, passed = operation(1, "a", deadline=NOW + 5), operation(2, "b", deadline=NOW - 5)
    assert next_look([later, passed], {}, NOW) == 5
    assert next_look([later], {"op2": Observation(Seen.UNREACHABLE, at=NOW)}, NOW) == LOOK_AGAIN_SECONDS
    assert next_look([passed], {}, NOW) is None


names = st.sampled_from(["a", "b", "c"])
operations_ = st.lists(
    st.builds(
        lambda holds, shares, copies, state, deadline: operation(
            0, *holds, shares=tuple(shares - holds), copies=tuple(copies), state=state, deadline=deadline
        ),
        st.sets(names, max_size=2),
        st.sets(names, max_size=2),
        st.sets(st.sampled_from(["gpu 1", "gpu 2", "disk 8:0"])),
        st.sampled_from([State.PENDING, State.PENDING, State.RUNNING, State.CANCELLING]),
        st.sampled_from([None, NOW - 1, NOW + 1]),
    ),
    max_size=12,
).map(lambda found: [replace(one, id=f"op{number}", number=number) for number, one in enumerate(found)])


def collide(one: Operation, other: Operation) -> bool:
    mine, theirs = one.target, other.target
    return bool(set(mine.holds) & {*theirs.holds, *theirs.shares} or set(mine.shares) & set(theirs.holds))


@given(operations_, st.integers(1, 3), st.integers(1, 3), st.integers(1, 5))
def test_whatever_waits_starts_keep_order_and_limits(found: list[Operation], gpu: int, disk: int, running: int) -> None:
    limits = Limits(running=running, copies_per_gpu=gpu, copies_per_disk=disk)
    seen = {one.id: Observation(Seen.ATTENDED) for one in found}
    actions = decide(found, seen, limits, NOW)
    begin = [action.operation for action in actions if isinstance(action, Start)]
    ended = {action.operation.id for action in actions if isinstance(action, Finish)}
    begun = [one for one in found if one.state != State.PENDING]
    for one in begin:
        earlier = [other for other in found if other.number < one.number and other.state == State.PENDING]
        assert not any(collide(one, other) for other in begun)
        assert not any(collide(one, other) for other in earlier if other.id not in ended)
    load = Counter(name for one in [*begun, *begin] for name in one.target.copies)
    for one in begin:
        assert all(load[name] <= (gpu if name.startswith("gpu") else disk) for name in one.target.copies)
    assert not begin or len(begun) + len(begin) <= running
    first = next((one for one in found if one.state == State.PENDING and one.id not in ended), None)
    if first is not None and not begun:
        assert first in begin, "what waits first and finds everything free begins"


@given(operations_, st.sampled_from([*Seen, None]))
def test_each_operation_gets_at_most_one_action(found: list[Operation], sight: Seen | None) -> None:
    seen = {one.id: Observation(sight) for one in found} if sight else {}
    counts = Counter(action.operation.id for action in decide(found, seen, Limits(), NOW))
    assert all(count == 1 for count in counts.values())
