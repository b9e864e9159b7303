"""The formula: recency, frequency, size, cost of a restore."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.store.policy.forecast import Expected
from kybernate.store.policy.model import DISK, OBJECT, RAM, TierState
from kybernate.store.policy.temperature import (
    expected_rate,
    rate,
    rate_of,
    saved_seconds,
    temperature,
    uses_of,
    weight,
)
from tests.unit.store.policy.states import DAY, HOUR, NOW, image, tiers

GIB = 1 << 30
ALL = tiers(ram=0, disk=0, object=0)


def test_use_counts_half_after_a_half_life() -> None:
    assert weight([NOW - DAY], NOW, DAY) == pytest.approx(0.5)
    assert weight([NOW, NOW - DAY, NOW - 2 * DAY], NOW, DAY) == pytest.approx(1.75)


def test_rate_of_regular_uses_is_theirs() -> None:
    hourly = [NOW - number * HOUR for number in range(1, 72)]
    assert rate(hourly, NOW, DAY) == pytest.approx(1 / HOUR, rel=0.05)


def test_what_was_not_used_for_longer_than_usual_cools_as_fast_as_with_lru() -> None:
    hourly = [NOW - 10 * HOUR - number * HOUR for number in range(72)]
    assert rate(hourly, NOW, DAY) == pytest.approx(1 / (10 * HOUR))


def test_recent_and_frequent_uses_are_warmer() -> None:
    assert rate([NOW - 60], NOW, DAY) > rate([NOW - 600], NOW, DAY)
    assert rate([NOW - 600, NOW - 1200], NOW, DAY) > rate([NOW - 600, NOW - 9000], NOW, DAY)
    assert rate([], NOW, DAY) <= rate([NOW], NOW, DAY)


ages = st.floats(0, 100 * DAY)


@given(st.lists(ages, min_size=1, max_size=20), st.floats(60, 30 * DAY), st.floats(1, DAY))
def test_rate_is_finite_positive_and_falls_without_a_use(found: list[float], half_life: float, later: float) -> None:
    uses = [NOW - age for age in found]
    now, then = rate(uses, NOW, half_life), rate(uses, NOW + later, half_life)
    assert 0 <= then <= now * 1.000001 + 1e-12
    assert now <= len(uses) / 60.0


@given(st.lists(ages, min_size=1, max_size=10), st.floats(60, 30 * DAY))
def test_rate_can_be_kept_up_use_by_use(found: list[float], half_life: float) -> None:
    """The simulator keeps the weight of each image from use to use."""
    uses = sorted(NOW - age for age in found)
    kept, last = 0.0, uses[0]
    for use in uses:
        kept, last = kept * 0.5 ** ((use - last) / half_life) + 1, use
    kept *= 0.5 ** ((NOW - last) / half_life)
    assert rate_of(kept, observed=NOW - uses[0], idle=NOW - last, half_life=half_life) == pytest.approx(
        rate(uses, NOW, half_life), abs=1e-15
    )


def test_saved_time_is_that_to_the_fastest_other_copy() -> None:
    assert saved_seconds(GIB, RAM, [DISK, OBJECT], ALL) == pytest.approx(1 - 1 / 4)
    assert saved_seconds(GIB, RAM, [OBJECT], ALL) == pytest.approx(4 - 1 / 4)
    assert saved_seconds(GIB, RAM, [], ALL) == pytest.approx(1 - 1 / 4)  # it goes to disk first
    assert saved_seconds(GIB, DISK, [RAM], ALL) == 0
    assert saved_seconds(GIB, OBJECT, [], ALL) == 0


def test_small_images_are_warmer_where_a_restore_has_a_fixed_cost() -> None:
    slow = {**ALL, OBJECT: TierState(read_bytes_per_second=GIB / 4, latency_seconds=2)}

    def warmth(size: int, tiers: dict[str, TierState]) -> float:
        return temperature(1.0, saved_seconds(size, RAM, [OBJECT], tiers), size)

    assert warmth(GIB, slow) > warmth(8 * GIB, slow)
    assert warmth(GIB, ALL) == pytest.approx(warmth(8 * GIB, ALL))


def test_expected_use_counts_as_its_probability_in_the_time_it_is_held() -> None:
    assert expected_rate(Expected(NOW, 4, 5, "every weekday", "09:00"), 1800) == pytest.approx(0.8 / 1800)
    assert expected_rate(None, 1800) == 0


def test_being_made_counts_as_a_use() -> None:
    made = image("a", RAM, age=60)
    assert uses_of(made) == (NOW - 60,)
    assert set(uses_of(replace(made, last_used=NOW - 5, uses=(NOW - 5, NOW - 9)))) == {NOW - 60, NOW - 5, NOW - 9}
