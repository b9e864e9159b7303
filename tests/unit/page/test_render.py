"""Sizes, durations and queries, as the page writes and reads them."""

from __future__ import annotations

from urllib.parse import parse_qs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.page.render import Query, clock, seconds, size


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 30, "5.0 GiB"), (1 << 60, "1024.0 PiB")]
)
def test_size(count: int, shown: str) -> None:
    assert size(count) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(0.481, "0.48 s"), (59, "59 s"), (200, "3 min 20 s"), (7260, "2 h 1 min")]
)
def test_seconds(value: float, shown: str) -> None:
    assert seconds(value) == shown


def test_clock() -> None:
    assert clock(0) == ""
    assert clock(1.5) == "1970-01-01T00:00:01Z"


@given(st.dictionaries(st.sampled_from(["page", "q", "level", "container", "other"]), st.text(max_size=300)))
def test_query_is_what_an_address_says(values: dict[str, str]) -> None:
    query = Query.of(values)
    again = {name: found[0] for name, found in parse_qs(query.at(query.number)).items()}
    assert Query.of(again) == query
