"""The comparison of handlers by critest, from the reports that Ginkgo writes."""

from __future__ import annotations

from xml.sax.saxutils import quoteattr

from tests.system.critest_table import differing, read, render


def report(**cases: str) -> str:
    lines = [f"<testcase name={quoteattr(name)} status={quoteattr(how)}/>" for name, how in cases.items()]
    return f"<testsuites><testsuite>{''.join(lines)}</testsuite></testsuites>"


def test_outcome_is_that_of_each_spec_by_its_full_text() -> None:
    found = read(report(**{"[It] [k8s.io] PodSandbox <1> & more": "passed", "[SynchronizedBeforeSuite]": "failed"}))
    assert found == {"[k8s.io] PodSandbox <1> & more": "passed"}


def test_spec_differs_where_one_handler_ends_it_otherwise_or_does_not_run_it() -> None:
    stock = {"a": "passed", "b": "failed", "c": "skipped", "d": "passed"}
    ours = {"a": "passed", "b": "passed", "c": "skipped", "e": "passed"}
    assert differing({"stock": stock, "ours": ours}) == ["b", "d", "e"]
    assert differing({"stock": stock, "ours": dict(reversed(stock.items()))}) == []
    assert differing({"stock": stock, "ours": stock, "path": ours}) == ["b", "d", "e"]


def test_tables_name_what_differs_what_all_fail_and_what_was_repeated() -> None:
    stock = {"a": "passed", "b|c": "failed", "d": "failed", "e": "skipped"}
    said = render({"runc": stock, "ours": stock | {"b|c": "passed"}}, ["a", "b|c"])
    assert "| `runc` | 4 | 1 | 2 | 1 |" in said
    assert "| `ours` | 4 | 2 | 1 | 1 |" in said
    assert "differs: 1" in said
    assert "| `b\\|c` | failed | passed |" in said
    assert "fail by all handlers: 1\n\n| spec |\n| --- |\n| `d` |" in said
    assert "repeated them: 1\n\n| spec |\n| --- |\n| `a` |" in said


def test_tables_say_so_where_there_is_nothing() -> None:
    same = {"a": "passed"}
    assert render({"runc": same, "ours": same}).count(": none\n") == 3
