"""Whatever a record that cannot be sent is named, and whatever else there is, a few hundred questions find it."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from kybernate.node.hidden_records import LETTERS, hidden

IDS = st.text(LETTERS, min_size=1, max_size=76)


@given(st.sets(IDS, max_size=3))
def test_one_of_those_that_cannot_be_sent_is_found(ids: set[str]) -> None:
    asked = 0

    def fails(expression: str) -> bool:
        nonlocal asked
        asked += 1
        return any(re.search(expression, id) for id in ids)

    found = hidden(fails)
    assert found in ids if ids else found is None
    assert asked <= 77 * 8


def test_longest_id_is_found_whole() -> None:
    id = (LETTERS + LETTERS)[:76].replace("-", "a").replace(".", "b").replace("_", "c")
    assert hidden(lambda expression: re.search(expression, id) is not None) == id
