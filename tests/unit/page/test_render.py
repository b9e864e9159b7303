"""Times and queries, as the page writes and reads them."""

from __future__ import annotations

from urllib.parse import parse_qs

from hypothesis import given
from hypothesis import strategies as st

from kybernate.page.render import Query, clock


def test_clock() -> None:
    assert clock(0) == ""
    assert clock(1.5) == "1970-01-01T00:00:01Z"


@given(st.dictionaries(st.sampled_from(["page", "q", "level", "container", "other"]), st.text(max_size=300)))
def test_query_is_what_an_address_says(values: dict[str, str]) -> None:
    query = Query.of(values)
    again = {name: found[0] for name, found in parse_qs(query.at(query.number)).items()}
    assert Query.of(again) == query
