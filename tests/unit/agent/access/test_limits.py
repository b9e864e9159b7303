"""Calls a minute, and connections at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.agent.access.limits import Buckets, Places
from kybernate.node.failure import Refused


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
