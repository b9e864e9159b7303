"""Calls a minute, and connections at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.agent.access.limits import Buckets, Places, Weights
from kybernate.node.failure import Exhausted, Refused


@given(st.integers(1, 20), st.lists(st.floats(0, 30), max_size=60))
def test_no_window_has_more_calls_than_bucket_and_refill_give(limit: int, pauses: list[float]) -> None:
    time = [0.0]
    buckets = Buckets(lambda: time[0])
    taken = []
    for pause in pauses:
        time[0] += pause
        if buckets.take("one", limit):
            taken.append(time[0])
    for first, begin in enumerate(taken):
        for last, end in enumerate(taken[first:], first):
            assert last - first + 1 <= limit + (end - begin) * limit / 60 + 1e-6


def test_keys_have_buckets_of_their_own_and_are_forgotten() -> None:
    time = [0.0]
    buckets = Buckets(lambda: time[0])
    assert [buckets.take("one", 2) for _ in range(3)] == [True, True, False]
    assert buckets.take("other", 2)
    time[0] = 30
    assert buckets.take("one", 2)
    time[0] = 1000
    for number in range(3000):
        buckets.take(str(number), 2)
        time[0] += 1
    assert len(buckets._level) < 1100


def test_place_is_free_again_after_its_block() -> None:
    places = Places()
    with places.one("a", 1):
        with pytest.raises(Refused, match="a has 1"), places.one("a", 1):
            pass
        with places.one("b", 1):
            pass
    with pytest.raises(ZeroDivisionError), places.one("a", 1):
        raise ZeroDivisionError
    with places.one("a", 1):
        pass
    assert not places._taken


def test_answers_that_are_not_read_are_limited_by_caller_and_for_all() -> None:
    weights = Weights(calls=2, bytes=100, all_bytes=150)
    weights.add("one", 90)
    with pytest.raises(Exhausted, match="answers of 0 MiB wait for one"):
        weights.add("one", 11)
    weights.add("other", 500)  # a single answer always passes
    with pytest.raises(Exhausted):
        weights.add("one", 1)
    weights.add("other", -500)
    weights.add("one", 10)
    assert not Weights(1, 1, 1)._bytes


def test_calls_at_the_same_time_are_limited_by_caller() -> None:
    weights = Weights(calls=2, bytes=100, all_bytes=150)
    weights.begin("one")
    weights.begin("one")
    weights.begin("other")
    with pytest.raises(Exhausted, match="one has 2 calls at the same time already"):
        weights.begin("one")
    weights.add("one", 100)
    weights.end("one", 100)
    weights.begin("one")
    weights.add("one", 100)
    for key in ("one", "one", "other"):
        weights.end(key, 0 if key == "other" else 50)
    assert (weights._calls, weights._bytes) == ({}, {})
