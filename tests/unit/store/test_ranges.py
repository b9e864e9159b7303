"""Ranges of files, compared with sets of bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kybernate.store.ranges import Ranges

RANGE = st.tuples(st.integers(0, 40), st.integers(0, 12))


@given(st.lists(RANGE, max_size=12), RANGE)
def test_missing_is_what_no_range_has(added: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    ranges, there = Ranges(), set[int]()
    for offset, size in added:
        ranges.add("a", offset, size)
        there |= set(range(offset, offset + size))
    wanted = set(range(asked[0], sum(asked)))
    found = ranges.missing("a", *asked)
    assert [at for begin, size in found for at in range(begin, begin + size)] == sorted(wanted - there)
    assert all(size > 0 for _, size in found)
    assert ranges.has("a", *asked) == (wanted <= there)
    assert ranges.has("b", *asked) == (not wanted)
