"""What the page knows is what its source has reported, whatever the order and the interruptions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kybernate.page.known import ENDED_OPERATIONS, PAGE, WAKES, Known, rows, why
from kybernate.page.view import (
    Begin,
    Change,
    Container,
    End,
    Event,
    Found,
    Gone,
    Gpu,
    Lost,
    Operation,
    Put,
    Seat,
    Section,
    Share,
    Tier,
)

GIB = 1 << 30


def known_of(*changes: Change) -> Known:
    known = Known()
    for change in changes:
        known.apply(change)
    return known


containers = st.builds(
    Container, st.sampled_from(["a", "b", "c"]), st.sampled_from(["x", "y"]), state=st.sampled_from(["running", ""])
)
changes = st.one_of(st.builds(Put, containers), st.builds(Gone, containers))
snapshots = st.lists(containers, max_size=4).map(lambda all: [Begin(), *map(Put, all), End()])


@given(st.lists(changes.map(lambda one: [one]) | snapshots, max_size=20))
def test_state_is_the_last_that_was_said(parts: list[list[Change]]) -> None:
    expected: dict[str, Container] = {}
    known = Known()
    for part in parts:
        before, version = known.containers(), dict(known.version)
        if isinstance(part[0], Begin):
            expected = {}
        for change in part:
            if isinstance(change, Put) and isinstance(change.object, Container):
                expected[change.object.key] = change.object
            elif isinstance(change, Gone):
                expected.pop(str(change.object.key), None)
            known.apply(change)
        assert {one.key: one for one in known.containers()} == expected
        if known.containers() != before:  # what looks different has another version
            assert known.version[Section.CONTAINERS] > version[Section.CONTAINERS]
        else:
            assert all(known.version[one] >= version[one] for one in Section)


def test_interrupted_snapshot_changes_nothing() -> None:
    known = known_of(Put(Tier("disk", "/d")), Begin(), Put(Tier("ram", "/r")))
    assert [one.key for one in known.tiers()] == ["disk"]
    known.apply(Begin())
    known.apply(End())
    assert known.tiers() == []


def test_unchanged_object_is_no_change() -> None:
    known = known_of(Put(Tier("disk", "/d")))
    assert known.apply(Put(Tier("disk", "/d"))) == frozenset()
    assert known.apply(Gone(Tier("ram", ""))) == frozenset()


def test_events_that_are_repeated_are_shown_once() -> None:
    events = [Event(n, float(n), "a.b", "info", str(n)) for n in (1, 2, 3)]
    known = known_of(*map(Put, events), *map(Put, events), Put(Event(4, 4.0, "a.b", "error", "4", "id")))
    assert [one.key for one in known.events()] == [4, 3, 2, 1]
    assert [one.key for one in known.events("error")] == [4]
    assert [one.key for one in known.events(container="k8s.io/id")] == [4]
    assert known.event_rows(9).number == 1


def ended(n: int, verb: str = "resume", state: str = "succeeded", container: str = "ns/a") -> Operation:
    return Operation(f"{n:06}", verb, state, container, created=float(n), ended=n + 0.5)


def test_wakes_are_those_that_succeeded() -> None:
    known = known_of(
        Put(Operation("000001", "resume", "running", "ns/a", created=1.0)),
        Put(ended(1)),
        Put(ended(1)),
        Put(ended(2, state="failed")),
        Put(ended(3, verb="suspend")),
        Put(ended(3, verb="wake")),  # of one that worked already
        *(Put(ended(n)) for n in range(4, 4 + WAKES)),
    )
    assert known.wakes("ns/a") == (0.5,) * WAKES
    assert known.wakes("ns/b") == ()


def test_operations_that_ended_are_bounded_and_survive_a_snapshot() -> None:
    known = known_of(*(Put(ended(n)) for n in range(ENDED_OPERATIONS + 5)), Begin(), End())
    assert len(known.operations()) == ENDED_OPERATIONS
    assert known.operations()[0].key == f"{ENDED_OPERATIONS + 4:06}"


def test_running_operations_are_first() -> None:
    known = known_of(Put(ended(5)), Put(Operation("000001", "suspend", "running", created=1.0)))
    assert [one.state for one in known.operations()] == ["running", "succeeded"]


@given(st.integers(0, 1000), st.integers(-5, 50))
def test_pages_cover_a_list(count: int, number: int) -> None:
    found = rows(range(count), number)
    assert 1 <= found.number <= found.pages
    assert [one for page in range(1, found.pages + 1) for one in rows(range(count), page).rows] == list(range(count))
    assert len(found.rows) <= PAGE


SLEEPING = Container("ns/a", "a", state="running", gpu="suspended", host_bytes=4 * GIB, gpus=("GPU-0",))


def test_why_names_what_runs() -> None:
    running = Operation("1", "resume", "running", "ns/a", step="copy", seconds_left=3)
    assert why(SLEEPING, known_of(Put(running))) == "resume is running: copy, about 3 s are left."


def test_why_names_the_last_failure_and_who_has_the_room() -> None:
    known = known_of(
        Put(SLEEPING),
        Put(Container("ns/b", "b", state="running", gpu="attached", gpus=("GPU-0",))),
        Put(Gpu("GPU-0", 0, "H100", 8 * GIB, 6 * GIB)),
        Put(Operation("1", "resume", "failed", "ns/a", ended=1.0, error="no room", advice="Suspend another one")),
    )
    said = why(SLEEPING, known)
    assert "Its last resume failed: no room. Suspend another one." in said
    assert "GPU 0 has less free memory than it needs; b hold the rest." in said


def test_why_names_the_seat_and_what_is_before_it() -> None:
    seat = Seat(
        "s2", group="g0", status="suspended", container="ns/a", waits=("use",), reason="s1 is busy", before=("s1",)
    )
    said = why(SLEEPING, known_of(Put(SLEEPING), Put(seat), Put(Seat("s1", group="g0", container="ns/b"))))
    assert said.startswith("It is suspended. Its seat s2 in the group g0 is suspended: s1 is busy.")
    assert "Open requests: use. Before it: s1." in said
    assert why(SLEEPING, known_of(Put(Seat("s1", container="ns/b")))).endswith("nothing has asked for it.")


def test_memory_without_an_owner_is_that_of_other_processes() -> None:
    gpu = Gpu("GPU-0", 0, "H100", 80, 30, (Share("ns/a", 12), Share("ns/b", 8)))
    assert gpu.other == 10
    assert Gpu("GPU-0", 0, "H100", 80, 10, (Share("ns/a", 12),)).other == 0  # the two were read at different times


def test_snapshot_with_a_wake_changes_the_containers_charts() -> None:
    known = known_of(Put(SLEEPING))
    version = known.version[Section.CONTAINERS]
    for change in (Begin(), Put(SLEEPING), Put(ended(1)), End()):
        known.apply(change)
    assert known.version[Section.CONTAINERS] > version


def test_why_says_that_nothing_has_asked() -> None:
    assert why(SLEEPING, known_of()) == "It is suspended, and nothing has asked for it."


def test_trouble_is_over_when_the_source_answers() -> None:
    known = known_of(Found("node"), Lost("away"))
    assert known.trouble == Lost("away")
    known.apply(Found("node"))
    assert known.trouble is None
