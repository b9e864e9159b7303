"""Windows of the week, in their time zone."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.seats.windows import Window, changes, preferred

BERLIN = ZoneInfo("Europe/Berlin")
DAY = Window(frozenset(range(5)), 8 * 60, 20 * 60, "inference")
NIGHT = Window(frozenset(range(7)), 20 * 60, 8 * 60, "training")


def at(text: str, zone: ZoneInfo = BERLIN) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=zone).timestamp()


@pytest.mark.parametrize(
    ("when", "kind"),
    [
        ("2027-01-15 07:59", "training"),
        ("2027-01-15 08:00", "inference"),
        ("2027-01-15 19:59", "inference"),
        ("2027-01-15 20:00", "training"),
        ("2027-01-16 12:00", ""),  # a Saturday
        ("2027-01-17 03:00", "training"),
    ],
)
def test_the_kind_of_a_time(when: str, kind: str) -> None:
    assert preferred((DAY, NIGHT), BERLIN, at(when)) == kind


def test_changes_are_in_order_and_differ() -> None:
    found = list(changes((DAY, NIGHT), BERLIN, at("2027-01-15 07:00"), days=2))
    shown = [(datetime.fromtimestamp(one.at, BERLIN).strftime("%a %H:%M"), one.prefer) for one in found]
    assert shown[:5] == [
        ("Fri 08:00", "inference"),
        ("Fri 20:00", "training"),
        ("Sat 08:00", ""),
        ("Sat 20:00", "training"),
        ("Sun 08:00", ""),
    ]


def test_a_skipped_hour_begins_where_the_clock_jumps() -> None:
    """In Berlin, 2027-03-28 has no 02:30."""
    window = Window(frozenset({6}), 2 * 60 + 30, 5 * 60, "training")
    (begin, end) = list(changes((window,), BERLIN, at("2027-03-28 00:00"), days=1))
    assert datetime.fromtimestamp(begin.at, UTC).strftime("%H:%M") == "01:00"
    assert datetime.fromtimestamp(end.at, UTC).strftime("%H:%M") == "03:00"


windows = st.builds(
    Window,
    st.frozensets(st.integers(0, 6), min_size=1),
    st.integers(0, 1439),
    st.integers(0, 1440),
    st.sampled_from(("inference", "training")),
)


@given(st.lists(windows, max_size=3), st.floats(at("2027-03-20"), at("2027-11-05")))
def test_the_preferred_kind_changes_at_changes_alone(found: list[Window], now: float) -> None:
    kind, last = preferred(found, BERLIN, now), now
    for change in changes(found, BERLIN, now, days=1):
        assert change.at > last
        assert preferred(found, BERLIN, (last + change.at) / 2) == kind
        assert change.prefer == preferred(found, BERLIN, change.at) != kind
        kind, last = change.prefer, change.at
