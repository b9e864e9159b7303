"""When workloads are expected: weekdays at nine, missed days, single uses, changes to daylight saving time, chance."""

from __future__ import annotations

import random
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.store.policy.forecast import LOOK_BACK, MOST, Expected, Uses, expected_on, expected_use, remember

BERLIN = ZoneInfo("Europe/Berlin")
MONDAY = date(2026, 1, 5)
DAY = 86400.0


def wall(day: date, hour: float) -> float:
    """Return when a clock in Berlin shows that hour."""
    return (datetime(day.year, day.month, day.day, tzinfo=BERLIN) + timedelta(hours=hour)).timestamp()


def days(count: int, first: date = MONDAY) -> list[date]:
    return [first + timedelta(number) for number in range(count)]


def weekdays(count: int, first: date = MONDAY, hour: float = 9) -> Uses:
    return tuple(wall(day, hour) for day in days(count, first) if day.weekday() < 5)


def clocks(uses: Uses, day: date) -> list[str]:
    return [one.clock for one in expected_on(uses, day, BERLIN)]


def test_use_on_weekdays_is_expected_on_weekdays_alone() -> None:
    uses = weekdays(21)  # those of the day itself, and of later ones, do not count
    found = {day.strftime("%a"): clocks(uses, day) for day in days(7, MONDAY + timedelta(14))}
    assert [day for day, clock in found.items() if clock] == ["Mon", "Tue", "Wed", "Thu", "Fri"]
    assert {clock for listed in found.values() for clock in listed} == {"09:00"}


def test_three_days_are_enough_and_two_are_not() -> None:
    assert clocks(weekdays(2), MONDAY + timedelta(2)) == []
    assert clocks(weekdays(3), MONDAY + timedelta(3)) == ["09:00"]


def test_missed_days_do_not_end_a_pattern_and_a_week_without_does() -> None:
    uses = weekdays(12)
    assert clocks(uses, MONDAY + timedelta(15)) == ["09:00"]  # Monday and Tuesday were missed
    assert clocks(uses, MONDAY + timedelta(18)) == []


def test_single_use_is_not_expected_again() -> None:
    assert all(clocks((wall(MONDAY, 9),), day) == [] for day in days(28))


def test_use_on_one_day_of_the_week_is_expected_on_that_day() -> None:
    uses = tuple(wall(MONDAY + timedelta(7 * week), 14) for week in range(3))
    (found,) = expected_on(uses, MONDAY + timedelta(21), BERLIN)
    assert (found.clock, found.kind, found.days, found.of) == ("14:00", "every Monday", 3, 3)
    assert clocks(uses, MONDAY + timedelta(22)) == []


def test_weekends_are_a_kind_of_their_own() -> None:
    uses = tuple(wall(day, 20) for day in days(14) if day.weekday() >= 5)
    assert clocks(uses, MONDAY + timedelta(19)) == ["20:00"]
    assert clocks(uses, MONDAY + timedelta(14)) == []


@pytest.mark.parametrize(
    ("first", "changed"), [(date(2026, 3, 16), date(2026, 3, 30)), (date(2026, 10, 12), date(2026, 10, 26))]
)
def test_change_to_daylight_saving_time_moves_nothing(first: date, changed: date) -> None:
    (found,) = expected_on(weekdays(14, first), changed, BERLIN)
    assert found.at == wall(changed, 9)
    assert found.clock == "09:00"


def test_time_that_the_clock_skips_is_an_hour_later() -> None:
    skipping = date(2026, 3, 29)
    sundays = tuple(wall(skipping - timedelta(7 * week), 2.5) for week in (1, 2, 3))
    (found,) = expected_on(sundays, skipping, BERLIN)
    assert datetime.fromtimestamp(found.at, BERLIN).strftime("%H:%M") == "03:30"


def test_early_days_of_a_pattern_set_the_time() -> None:
    hours = (9.0, 9.1, 8.95, 9.2, 9.15)
    uses = tuple(wall(MONDAY + timedelta(number), hour) for number, hour in enumerate(hours))
    (clock,) = clocks(uses, MONDAY + timedelta(7))
    assert clock == "09:00"


def test_pattern_around_midnight_is_one() -> None:
    hours = (23.95, 24.05, 23.9, 24.1, 23.95)
    uses = tuple(wall(MONDAY + timedelta(number), hour) for number, hour in enumerate(hours))
    now = wall(MONDAY + timedelta(7), 23.5)
    found = expected_use(uses, now=now, zone=BERLIN, ahead=3600, behind=0)
    assert found is not None
    assert datetime.fromtimestamp(found.at, BERLIN).hour >= 23


def test_uses_that_follow_each_other_are_one_arrival() -> None:
    busy = tuple(use + minute * 300.0 for use in weekdays(12) for minute in range(60))
    assert clocks(busy, MONDAY + timedelta(14)) == ["09:00"]


def test_expected_use_is_found_in_its_window_until_it_has_been_there() -> None:
    uses, nine = weekdays(12), wall(MONDAY + timedelta(14), 9)

    def at(seconds: float, *more: float) -> Expected | None:
        return expected_use((*uses, *more), now=nine + seconds, zone=BERLIN, ahead=120, behind=1800)

    assert at(-121) is None
    found = at(-120)
    assert found is not None
    assert found.at == nine
    assert at(1800) is not None
    assert at(1801) is None
    assert at(60, nine + 30) is None
    assert at(-60, nine - 300) is None


def test_uses_at_any_time_are_rarely_taken_for_a_pattern() -> None:
    """Of eight arrivals a day at random, what is expected on a hundred days is next to nothing."""
    rng = random.Random(1)
    uses = tuple(wall(day, rng.uniform(7, 19)) for day in days(128) for _ in range(8))
    found = [one for day in days(100, MONDAY + timedelta(28)) for one in expected_on(uses, day, BERLIN)]
    assert len(found) < 50  # of 800


def test_remembered_uses_are_bounded_and_keep_what_a_forecast_needs() -> None:
    kept: Uses = ()
    for use in (use + minute * 10.0 for use in weekdays(40) for minute in range(400)):
        kept = remember(kept, use)
    assert len(kept) <= MOST
    assert kept[-1] - kept[0] <= (LOOK_BACK + 1) * DAY
    day = MONDAY + timedelta(42)
    assert clocks(kept, day) == ["09:00"]


@given(st.lists(st.floats(0, 4e9), max_size=30), st.dates(date(1971, 1, 1), date(2100, 1, 1)))
def test_expected_uses_are_of_that_day_and_apart_from_each_other(uses: list[float], day: date) -> None:
    start = datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()
    for one in expected_on(tuple(uses), day, UTC):
        assert start - DAY / 72 <= one.at <= start + DAY * 73 / 72
        assert 3 <= one.days <= one.of <= 5
