"""Which events are written when: counted, combined, limited, and none of it lost without a number."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kybernate.agent.kubernetes.series import (
    COMBINED,
    KEEP_SECONDS,
    LONGEST_PAUSE,
    MOST_SERIES,
    NODE_BURST,
    POD_BURST,
    SIMILAR,
    Correlator,
)
from kybernate.agent.kubernetes.story import Subject, Told

POD = Subject("shop", "web", "u-1", "main")
FAILED = Told("RestoreFailed", "The container was not restored: x", warning=True)


def drain(correlator: Correlator, now: float) -> list[tuple[str, int]]:
    """Write all that is due, as an API that takes everything would; return messages and counts."""
    found = []
    while (one := correlator.next(now)[0]) is not None:
        one.name = one.name or one.new_name
        found.append((one.told.message, one.count))
        correlator.written(one, one.count, now)
    return found


def test_the_same_again_is_one_event_with_a_count() -> None:
    correlator = Correlator()
    correlator.add(POD, FAILED, 1.0, 1000.0)
    assert drain(correlator, 1.0) == [(FAILED.message, 1)]
    for second in range(2, 9):
        correlator.add(POD, FAILED, float(second), 1000.0 + second)
    assert drain(correlator, 8.0) == []  # not that soon again
    series, wait = correlator.next(8.0)
    assert series is None
    assert wait is not None
    assert drain(correlator, 8.0 + wait) == [(FAILED.message, 8)]
    assert correlator.next(1e6) == (None, None)


def test_a_crash_loop_costs_few_writes_and_loses_no_count() -> None:
    """Each second for two hours, with a message that always differs."""
    correlator, writes, counts = Correlator(), 0, {}
    for second in range(7200):
        correlator.add(POD, Told("RestoreFailed", f"after {second} s", warning=True), float(second), float(second))
        for message, count in drain(correlator, float(second)):
            writes += 1
            counts[message.startswith(COMBINED) or message] = count
    for message, count in drain(correlator, 7200.0 + LONGEST_PAUSE):
        counts[message.startswith(COMBINED) or message] = count
    assert writes < 200
    assert correlator.dropped == 0
    assert max(counts.values()) > 600


def test_similar_ones_are_combined_after_ten() -> None:
    correlator = Correlator()
    for number in range(SIMILAR + 5):
        correlator.add(POD, Told("Checkpointed", f"Wrote image n{number}"), 1.0, 1.0)
    written = drain(correlator, 1.0)
    assert len(written) == SIMILAR + 1
    assert written[-1] == (f"{COMBINED}Wrote image n{SIMILAR + 4}", 5)


def test_one_pod_cannot_take_the_nodes_share() -> None:
    correlator = Correlator()
    for number in range(300):
        correlator.add(POD, Told(f"Reason{number}", "x"), 1.0, 1.0)
    other = Subject("shop", "quiet", "u-2", "main")
    correlator.add(other, Told("Suspended", "y"), 1.0, 1.0)
    written = drain(correlator, 1.0)
    assert len(written) == POD_BURST + 1
    assert ("y", 1) in written


def test_the_node_has_a_limit() -> None:
    correlator = Correlator()
    for number in range(500):
        correlator.add(Subject("shop", f"web-{number}", f"u-{number}"), FAILED, 1.0, 1.0)
    assert len(drain(correlator, 1.0)) == NODE_BURST
    assert len(drain(correlator, 11.0)) == 20


def test_what_waits_too_long_or_is_too_much_is_dropped_with_a_count() -> None:
    correlator = Correlator()
    for number in range(MOST_SERIES + 7):
        correlator.add(Subject("shop", f"web-{number}", f"u-{number}"), FAILED, 1.0, 1.0)
    assert correlator.dropped == 7
    assert drain(correlator, 2.0 + KEEP_SECONDS) == []
    assert correlator.dropped == MOST_SERIES + 7
    assert correlator.next(2.0 + KEEP_SECONDS) == (None, None)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(0, 120)), max_size=120))
def test_every_event_is_written_or_counted_as_dropped(steps: list[tuple[int, int, int]]) -> None:
    correlator, now, written = Correlator(), 0.0, {}
    for pod, message, seconds in steps:
        now += seconds
        correlator.add(Subject("shop", f"web-{pod}", f"u-{pod}"), Told("Restored", str(message)), now, now)
        for one in iter(lambda: correlator.next(now)[0], None):  # noqa: B023
            one.name = one.name or one.new_name
            written[one.name] = one.count
            correlator.written(one, one.count, now)
    for _ in range(1000):
        one, wait = correlator.next(now)
        if one is not None:
            one.name = one.name or one.new_name
            written[one.name] = one.count
            correlator.written(one, one.count, now)
        elif wait is None:
            break
        else:
            now += wait
    assert sum(written.values()) + correlator.dropped == len(steps)


def test_what_is_settled_is_before_the_first_that_waits() -> None:
    correlator = Correlator()
    assert correlator.settled() == 0
    correlator.add(POD, FAILED, 1.0, 1.0, 3)
    correlator.add(POD, Told("Restored", "x"), 1.0, 1.0, 4)
    correlator.add(POD, FAILED, 1.0, 1.0, 5)
    correlator.pass_over(9)
    assert correlator.settled() == 2
    first, _ = correlator.next(1.0)
    assert first is not None
    assert first.told.reason == "Restored"
    correlator.add(POD, first.told, 1.0, 1.0, 10)  # while the first is being written
    correlator.written(first, 1, 1.0, 4)
    assert correlator.settled() == 2
    second, _ = correlator.next(1.0)
    assert second is not None
    correlator.written(second, 2, 1.0, 5)
    assert correlator.settled() == 4  # what came during the write is between 4 and 10
    drain(correlator, 1e3)
    assert correlator.settled() == 10


def test_what_is_given_up_is_settled() -> None:
    correlator = Correlator()
    correlator.add(POD, FAILED, 1.0, 1.0, 3)
    series, _ = correlator.next(1.0)
    assert series is not None
    correlator.drop(series)
    assert correlator.settled() == 3
