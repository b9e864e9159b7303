"""Which names operations may have, what is remembered of those that ended, and what a cancel is about."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.errors import Invalid, Missing
from kybernate_shim.task.operation_messages import ended
from kybernate_shim.task.outcomes import (
    KEPT,
    MOST_ERROR,
    Ending,
    Ledger,
    NothingToCancel,
    Outcome,
    operation_id,
    to_cancel,
)

ALLOWED = string.ascii_letters + string.digits + "._-"
ids = st.text(ALLOWED, min_size=1, max_size=64)


def outcome(id: str, ending: Ending = "succeeded", verb: str = "checkpoint") -> Outcome:
    return Outcome(id, verb, ending, at=0, seconds=1)


def ledger(*outcomes: Outcome) -> Ledger:
    made = Ledger()
    for one in outcomes:
        made.add(one)
    return made


@given(ids)
def test_name_of_an_operation_is_taken_as_it_is(id: str) -> None:
    assert operation_id(id) == id


def test_operation_need_not_have_a_name() -> None:
    assert operation_id("") == ""


@given(st.text(max_size=80))
def test_only_names_of_the_allowed_characters_are_taken(text: str) -> None:
    if len(text) <= 64 and set(text) <= set(ALLOWED):
        assert operation_id(text) == text
        return
    with pytest.raises(Invalid, match="at most 64 of"):
        operation_id(text)


@pytest.mark.parametrize("text", ["a" * 65, "a\n", "\na", "a/b", "a b", "é", "\0", "x" * (1 << 20)])
def test_odd_name_is_refused_in_a_short_message(text: str) -> None:
    with pytest.raises(Invalid, match="expected at most") as refused:
        operation_id(text)
    assert len(str(refused.value)) < 300


@given(st.lists(ids, max_size=3 * KEPT))
def test_ledger_keeps_the_newest(names: list[str]) -> None:
    kept = ledger(*(outcome(name) for name in names))
    assert [one.id for one in kept.outcomes] == names[::-1][:KEPT]
    for name in names[-KEPT:]:
        assert kept.find(name) is not None


def test_ledger_finds_the_newest_of_one_name_and_none_of_no_name() -> None:
    kept = ledger(outcome("a", "failed"), outcome("", "failed"), outcome("a"))
    found = kept.find("a")
    assert found is not None
    assert found.ending == "succeeded"
    assert kept.find("") is None


def test_cancel_is_about_what_it_names() -> None:
    assert to_cancel("b", ["a", "b"], Ledger(), "c") == 1


def test_cancel_without_a_name_is_about_what_runs() -> None:
    assert to_cancel("", ["a", ""], Ledger(), "c") == 0


def test_operation_that_runs_again_by_its_name_is_what_is_cancelled() -> None:
    assert to_cancel("a", ["a"], ledger(outcome("a", "failed")), "c") == 0


def test_repeated_cancel_gets_the_same_answer() -> None:
    assert to_cancel("a", [], ledger(outcome("a", "cancelled"), outcome("b")), "c") == outcome("a", "cancelled")


@pytest.mark.parametrize("ending", ["succeeded", "failed"])
def test_cancel_of_what_has_ended_names_its_end(ending: Ending) -> None:
    with pytest.raises(NothingToCancel, match=f"operation a, a checkpoint of container c, has {ending} already"):
        to_cancel("a", ["b"], ledger(outcome("a", ending)), "c")


def test_cancel_of_an_unknown_operation_is_not_one_of_another() -> None:
    with pytest.raises(Missing, match="operation x on container c"):
        to_cancel("x", ["a"], ledger(outcome("b")), "c")


def test_cancel_where_nothing_runs() -> None:
    with pytest.raises(NothingToCancel, match="no operation runs on container c"):
        to_cancel("", [], ledger(outcome("b", "cancelled")), "c")


def test_name_of_a_file_that_is_no_text_can_be_in_an_outcome() -> None:
    outcome = Outcome(
        "op", "checkpoint", "failed", 0.0, 1.0, error="/a\udcff: no space", state="\udcfe", path="/\udcfd"
    )
    assert ended(outcome).error == "/a\\udcff: no space"


def test_event_of_an_end_has_cause_and_figures_as_far_as_they_are_known() -> None:
    done = Outcome("o", "checkpoint", "succeeded", at=0, seconds=1.25, image_bytes=7, frozen_ms=3)
    assert done.labels == {"seconds": "1.250", "bytes": "7", "frozen_ms": "3"}
    failed = Outcome("o", "suspend", "failed", at=0, seconds=2, error="x" * 100_000)
    assert set(failed.labels) == {"seconds", "error"}
    assert len(failed.labels["error"]) == MOST_ERROR
