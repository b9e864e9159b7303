"""The simulator: queueing against a closed formula, conservation of work, its policies, traces and chart."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kybernate.seats.simulation.goodput import goodput, models_per_gpu
from kybernate.seats.simulation.plot import goodput_chart
from kybernate.seats.simulation.simulate import POLICIES, Setup, replay
from kybernate.seats.simulation.traces import Arrival, day, poisson, read_trace

FREE = Setup(gpus=1, seats=20, wake_seconds=0, suspend_seconds=0)


def test_waits_are_those_of_a_queue_with_one_server() -> None:
    """M/D/1: random arrivals, the same work, one GPU. Seats whose switches cost nothing are one queue."""
    load, work = 0.6, 1.0
    found = replay(list(poisson(20, load / work, work, 8_000)), "fifo", FREE)
    expected = load * work / (2 * (1 - load))
    assert sum(found.waits) / len(found.waits) == pytest.approx(expected, rel=0.15)
    assert found.utilisation == pytest.approx(load, rel=0.05)


traces = st.lists(
    st.builds(Arrival, st.floats(0, 500), st.sampled_from(("a", "b", "c", "d")), st.floats(0.1, 90)), max_size=25
).map(sorted)


@settings(deadline=None, max_examples=40)
@given(traces, st.sampled_from(sorted(POLICIES)), st.integers(1, 3))
def test_every_request_is_worked_on_and_no_work_is_lost(trace: list[Arrival], policy: str, gpus: int) -> None:
    found = replay(trace, policy, Setup(gpus, 0))
    assert len(found.waits) == len(trace)
    assert min(found.waits, default=0) >= 0
    assert found.busy_seconds == pytest.approx(sum(one.work for one in trace))
    assert found.utilisation <= 1 + 1e-9
    assert 0 < found.fairness <= 1 + 1e-9


def test_the_arbiter_bounds_what_priority_starves() -> None:
    """Seat 2 has the highest class and is always at work; seat 0 has the lowest."""
    trace = sorted([Arrival(1.0, "s0", 5.0), *(Arrival(float(at), "s2", 10.0) for at in range(0, 1000, 10))])
    starved, bounded = (replay(trace, policy, Setup(1, 3, 1.0, 1.0)) for policy in ("priority", "kybernate"))
    assert max(starved.waits) > 900
    assert max(bounded.waits) < max(starved.waits)
    assert starved.stretch["s0"] > 100 > bounded.stretch["s0"]


def test_fewer_models_are_served_better() -> None:
    setup = Setup(1, 1)
    few, many = (goodput("kybernate", models, setup, 1 / 60, 2.0, 1800).goodput for models in (2, 40))
    assert few > many


def test_the_number_of_models_is_the_largest_that_is_good() -> None:
    setup = Setup(1, 1)
    found = models_per_gpu("kybernate", setup, 1 / 60, 2.0, 1800)
    assert goodput("kybernate", found, setup, 1 / 60, 2.0, 1800).goodput >= 0.9
    assert goodput("kybernate", found + 1, setup, 1 / 60, 2.0, 1800).goodput < 0.9
    assert models_per_gpu("kybernate", replace(setup, bound=0.0, wake_seconds=9.0), 1.0, 9.0, 600) <= 1


def test_a_day_has_more_requests_at_noon_than_at_night() -> None:
    found = list(day(50, 2000))
    noon = sum(10 * 3600 <= one.at < 14 * 3600 for one in found)
    night = sum(one.at < 2 * 3600 or one.at >= 22 * 3600 for one in found)
    assert noon > 2 * night
    assert found == sorted(found)


def test_a_trace_is_read() -> None:
    found = read_trace(["# at,seat,work", "3, b, 1.5", "", "1,a,2  # first"])
    assert found == [Arrival(1.0, "a", 2.0), Arrival(3.0, "b", 1.5)]


@pytest.mark.parametrize("line", ["1,a", "x,a,1", "1,,1", "1,a,0", "-1,a,1", "1,a,nan", "inf,a,1"])
def test_a_line_that_is_none_is_named(line: str) -> None:
    with pytest.raises(ValueError, match="line 2"):
        read_trace(["1,a,1", line])


def test_the_chart_is_a_document_with_a_line_for_each_policy() -> None:
    text = goodput_chart({"a<b": [(1, 1.0), (4, 0.5)], "c": [(1, 0.9), (4, 0.1)]}, 0.9)
    root = ElementTree.fromstring(text)
    assert len(root.findall("{*}polyline")) == 2
    assert "a<b" in [one.text for one in root.findall("{*}text")]
