"""llama-swap's matrix: its expressions, and what leaves for what."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.seats.matrix import MatrixInvalid, read_matrix


def combinations(**sets: str) -> set[str]:
    return {"".join(sorted(one)) for one in read_matrix({"sets": sets}).combinations}


def test_and_binds_before_or() -> None:
    assert combinations(s="a & b | c") == {"ab", "c"}
    assert combinations(s="a & (b | c)") == {"ab", "ac"}


def test_a_set_contains_another() -> None:
    assert combinations(s="+t & c", t="a | b") == {"ac", "bc", "a", "b"}


def test_what_costs_least_leaves() -> None:
    found = read_matrix({"vars": {"x": "big"}, "evict_costs": {"x": 5}, "sets": {"s": "new & x | new & small"}})
    assert found.to_evict("new", ["big", "small"]) == {"small"}
    assert found.to_evict("unnamed", ["big"]) == frozenset()


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "must be a mapping"),
        ({"sets": {}}, "at least one set"),
        ({"sets": {"a": "+a"}}, "contains itself"),
        ({"sets": {"a": "+b"}}, "which is no set"),
        ({"sets": {"a": "(x"}}, "not closed"),
        ({"sets": {"a": "x y"}}, "not expected"),
        ({"sets": {"a": "x ~ y"}}, "character 2"),
        ({"sets": {"a": "x"}, "evict_costs": {"y": 3}}, "neither a variable"),
        ({"sets": {"a": "x"}, "evict_costs": {"x": 0}}, "above 0"),
        ({"sets": {"a": "x"}, "more": 1}, "unknown keys"),
        ({"sets": {"a": " & ".join(f"(a{n} | b{n})" for n in range(13))}}, "more than 4096"),
        ({"sets": {"a": "(" * 5000}}, "a name is missing"),
    ],
)
def test_a_mistake_is_named(document: Any, words: str) -> None:
    with pytest.raises(MatrixInvalid, match=words):
        read_matrix(document)


@given(st.text(st.sampled_from("ab&|()+ ~"), max_size=30))
def test_any_expression_is_read_or_refused(text: str) -> None:
    try:
        found = read_matrix({"sets": {"a": text, "b": "x"}})
    except MatrixInvalid:
        return
    for one in found.names:
        assert found.allows([one])
        assert found.allows({*found.names} - found.to_evict(one, found.names))
