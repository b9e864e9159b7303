"""Traces that are read, and what becomes of them with LRU, LFU and the policy."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.store.policy.model import Rules, TierState
from kybernate.store.simulation.simulate import REPLACEMENTS, Replayed, Setup, replay
from kybernate.store.simulation.synthetic import MAKERS, synthetic
from kybernate.store.simulation.traces import Access, read_traces

GIB = 1 << 30
FAST, SLOW = TierState(read_bytes_per_second=4 * GIB), TierState(read_bytes_per_second=GIB / 4)
HOUR, DAY = 3600.0, 86400.0


def uses(names: str, *, every: float = 60.0, size: int = 1) -> list[Access]:
    """Return a use a minute of the workloads that are letters of `names`."""
    return [Access(number * every, name, size * GIB) for number, name in enumerate(names)]


def outcome(trace: Iterable[Access], name: str, capacity: int = 2, rules: Rules = Rules()) -> Replayed:  # noqa: B008
    return replay(trace, name, Setup(capacity * GIB, FAST, SLOW, rules))


# ---- traces


def read(text: str, **more: float) -> list[Access]:
    return read_traces([text.splitlines(keepends=True)], size=7, **more)


def test_csv_is_read_in_the_order_of_time() -> None:
    found = read("workload,time,size\nb,2026-01-05T09:00:00+01:00,5\na,0.5,\n\n")
    eight = datetime(2026, 1, 5, 8, tzinfo=UTC).timestamp()
    assert found == [Access(0.5, "a", 7), Access(eight, "b", 5)]


def test_json_lines_are_read() -> None:
    lines = [{"time": 3, "workload": "a"}, {"time": "2026-01-05T09:00:00", "workload": "b", "size": 9}]
    found = read("\n".join(map(json.dumps, lines)) + "\n\n")
    assert [(one.workload, one.size) for one in found] == [("a", 7), ("b", 9)]
    assert datetime.fromtimestamp(found[1].time, UTC).hour == 9


def test_published_trace_of_minutes_is_read_a_file_a_day() -> None:
    header = "HashOwner,HashApp,HashFunction,Trigger," + ",".join(str(number) for number in range(1, 1441))
    row = "o,application,f,timer," + ",".join("3" if number in (1, 540) else "0" for number in range(1, 1441))
    found = read_traces([[header, row], [header, row]], size=7)
    clocks = [datetime.fromtimestamp(one.time, UTC).strftime("%a %H:%M") for one in found]
    assert clocks == ["Mon 00:00", "Mon 08:59", "Tue 00:00", "Tue 08:59"]
    assert {one.workload for one in found} == {"application"}


def test_published_trace_of_invocations_is_read() -> None:
    (one,) = read("app,func,end_timestamp,duration\nabc,f,100.5,0.5\n")
    assert (one.workload, one.time % DAY) == ("abc", 100.0)


def test_use_while_the_workload_runs_is_no_restore() -> None:
    text = "time,workload\n0,a\n50,a\n110,a\n300,a\n"
    assert [one.time for one in read(text, idle=100)] == [0, 300]
    assert len(read(text)) == 4


NO_TRACES = (
    "",
    "nothing\n",
    "time,workload\nnow,a\n",
    "time,workload\n1,a,x,y\nnan,b\n",
    "time,workload,size\n1,a,many\n",
    '{"time": 1}\n',
    "{\n",
    '{"time": 1, "workload": "a", "size": -1}',
    '{"time": 1, "workload": "a"}\n[]\n',
    "app,end_timestamp,duration\na,b,c\n",
    "app,end_timestamp,duration\na\n",
)


@pytest.mark.parametrize("text", NO_TRACES)
def test_what_is_no_trace_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(ValueError, match="line "):
        read(text)


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        read(text)
    except ValueError:
        pass


# ---- replacement


def test_lru_evicts_what_was_used_least_recently_and_lfu_what_was_used_least_often() -> None:
    trace = uses("aaabcab")
    assert (outcome(trace, "lru").hits, outcome(trace, "lfu").hits) == (2, 3)


def test_waiting_and_bytes_are_those_of_hits_and_misses() -> None:
    found = outcome(uses("aa"), "lru")
    assert (found.uses, found.hits, found.hit_ratio) == (2, 1, 0.5)
    assert (found.moved_bytes, found.used_bytes, found.hit_bytes) == (GIB, 2 * GIB, GIB)
    assert found.waited_seconds == pytest.approx(4 + 0.25)


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_image_that_does_not_fit_is_read_each_time(name: str) -> None:
    found = outcome(uses("aaa", size=3), name)
    assert (found.hits, found.moved_bytes) == (0, 9 * GIB)


accesses = st.lists(
    st.builds(Access, st.floats(0, 20 * DAY), st.sampled_from("abcdef"), st.just(0)).map(
        lambda one: Access(one.time, one.workload, ("abcdef".index(one.workload) + 1) * GIB)
    ),
    max_size=40,
).map(lambda found: sorted(found, key=lambda one: one.time))


@given(accesses, st.integers(0, 12), st.sampled_from(sorted(REPLACEMENTS)))
def test_figures_of_any_trace_fit_together(trace: list[Access], capacity: int, name: str) -> None:
    found = outcome(trace, name, capacity)
    assert found.uses == len(trace)
    assert found.hit_bytes + found.moved_bytes - found.prefetched_bytes <= found.used_bytes
    first = {one.workload for one in trace}
    assert found.uses - found.hits >= (0 if found.prefetched else len(first))
    assert found.waited_seconds >= sum(FAST.seconds(one.size) for one in trace) - 1e-6
    assert found.waited_seconds <= sum(SLOW.seconds(one.size) for one in trace) + found.prefetched * 64 + 1e-6


def test_scan_does_not_displace_what_is_used_again_and_again() -> None:
    trace = uses("abababab" + "cabdabeabfabgabhab", every=10)
    assert outcome(trace, "kybernate").hits > outcome(trace, "lru").hits


def test_workload_of_weekdays_at_nine_is_in_memory_at_nine() -> None:
    """Three mornings teach it; on each of the other four, and after a weekend, the image was brought before."""
    zone = ZoneInfo("Europe/Berlin")
    mornings = [datetime(2026, 3, day, 9, tzinfo=zone).timestamp() for day in (23, 24, 25, 26, 27, 30, 31)]
    others = [
        Access(time + 7 * HOUR + 600 * number, f"{time}-{number}", GIB) for time in mornings for number in range(10)
    ]
    trace = sorted([*(Access(time, "nine", GIB) for time in mornings), *others], key=lambda one: one.time)
    found = outcome(trace, "kybernate", 2, Rules(zone=zone))
    assert (found.prefetched, found.prefetched_in_vain, found.hits) == (4, 0, 4)
    assert outcome(trace, "lru", 2).hits == 0


@pytest.mark.parametrize("name", MAKERS)
def test_synthetic_trace_is_the_same_each_time_and_in_order(name: str) -> None:
    trace = synthetic(name, UTC)
    assert trace == synthetic(name, UTC)
    assert all(one.time <= other.time for one, other in pairwise(trace))
    assert len({one.workload for one in trace}) > 10
