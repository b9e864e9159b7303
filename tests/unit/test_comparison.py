"""The comparison of handlers by tests of others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.system.comparison import Outcomes, Run, compare, differing, render

Calls = list[tuple[str, Path, list[str]]]


def suite(calls: Calls, *rounds: dict[str, dict[str, str]]) -> Run:
    """Return what runs tests: the first round's outcomes for all of them, the second one's for those repeated."""

    def run(handler: str, reports: Path, only: Sequence[str]) -> Outcomes:
        calls.append((handler, reports, list(only)))
        return rounds[bool(only)][handler]

    return run


def test_test_differs_where_one_handler_ends_it_otherwise_or_does_not_run_it() -> None:
    stock = {"a": "passed", "b": "failed", "c": "skipped", "d": "passed"}
    ours = {"a": "passed", "b": "passed", "c": "skipped", "e": "passed"}
    assert differing({"stock": stock, "ours": ours}) == ["b", "d", "e"]
    assert differing({"stock": stock, "ours": dict(reversed(stock.items()))}) == []
    assert differing({"stock": stock, "ours": stock, "path": ours}) == ["b", "d", "e"]


def test_tables_name_what_differs_what_all_fail_and_what_was_repeated() -> None:
    stock = {"a": "passed", "b|c": "failed", "d": "failed", "e": "skipped"}
    said = render({"runc": stock, "ours": stock | {"b|c": "passed"}}, ["a", "b|c"], word="spec")
    assert "| handler | specs | passed |" in said
    assert "| `runc` | 4 | 1 | 2 | 1 |" in said
    assert "| `ours` | 4 | 2 | 1 | 1 |" in said
    assert "Specs whose outcome differs: 1\n\n| spec | `runc` | `ours` |" in said
    assert "| `b\\|c` | failed | passed |" in said
    assert "fail by all handlers: 1\n\n| spec |\n| --- |\n| `d` |" in said
    assert "repeated them: 1\n\n| spec |\n| --- |\n| `a` |" in said


def test_tables_say_so_where_there_is_nothing() -> None:
    same = {"a": "passed"}
    assert render({"runc": same, "ours": same}, word="spec").count(": none\n") == 3


def test_tables_say_what_is_left_out_and_why() -> None:
    said = render({"runc": {}}, word="test", left_out={"Image.*": "no network"})
    assert "Tests that are left out: 1\n\n| tests | reason |\n| --- | --- |\n| `Image.*` | no network |" in said


def test_what_differs_is_repeated_by_all_and_ends_as_it_ends_again(tmp_path: Path) -> None:
    calls: Calls = []
    first = {"runc": {"a": "passed", "b": "passed"}, "ours": {"a": "passed", "b": "failed"}}
    again = {"runc": {"b": "passed"}, "ours": {"b": "passed"}}
    assert compare(["runc", "ours"], suite(calls, first, again), tmp_path, word="test") == 0
    assert calls == [
        ("runc", tmp_path / "runc", []),
        ("ours", tmp_path / "ours", []),
        ("runc", tmp_path / "runc/again", ["b"]),
        ("ours", tmp_path / "ours/again", ["b"]),
    ]
    assert "repeated them: 1" in (tmp_path / "result.md").read_text()


@pytest.mark.parametrize(
    ("stock", "ours"),
    [({"a": "passed"}, {"a": "failed"}), ({"a": "failed"}, {"a": "passed"}), ({"a": "failed"}, {"a": "failed"})],
)
def test_status_is_1_where_outcomes_differ_again_or_nothing_passes(
    tmp_path: Path, stock: dict[str, str], ours: dict[str, str]
) -> None:
    run = suite([], *[{"runc": stock, "ours": ours}] * 2)
    assert compare(["runc", "ours"], run, tmp_path, word="test") == 1
