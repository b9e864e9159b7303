"""The comparison of two handlers by Kubernetes' end-to-end tests, from the reports that Ginkgo writes."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import __main__ as conformance
from tests.conformance import specs, table
from tests.conformance.outcomes import NOT_RUN, NoSpecRan, Outcome, differences, read, shortfalls, unsuccessful

PASSED, FAILED = Outcome("passed"), Outcome("failed", message="it hangs\nfor long")


def spec(name: str, state: str = "passed", message: str = "", leaf: str = "It", **fields: Any) -> dict[str, Any]:
    failure = {"Failure": {"Message": message}} if message else {}
    return {"LeafNodeType": leaf, "LeafNodeText": name, "State": state, **failure, **fields}


def report(*found: dict[str, Any], reasons: list[str] | None = None) -> str:
    return json.dumps([{"SpecReports": list(found), "SpecialSuiteFailureReasons": reasons}])


def test_outcome_has_full_name_and_all_labels_of_a_spec() -> None:
    nested = spec(
        "should run [Conformance]",
        ContainerHierarchyTexts=["[sig-node] Pods", "in a Job"],
        ContainerHierarchyLabels=[["sig-node"], None],
        LeafNodeLabels=["Conformance"],
    )
    name = "[sig-node] Pods in a Job should run [Conformance]"
    assert read(report(nested)) == {name: Outcome("passed", frozenset({"sig-node", "Conformance"}))}


def test_outcome_is_skipped_where_the_spec_itself_skips_and_none_where_it_was_not_chosen() -> None:
    found = read(report(spec("windows", "skipped", "not on Linux"), spec("other", "skipped"), spec("one")))
    assert found == {"windows": Outcome("skipped", message="not on Linux"), "one": PASSED}


def test_spec_that_the_end_of_the_suite_cut_off_has_no_outcome() -> None:
    cut, slow = "A suite timeout occurred", "A spec timeout occurred"
    found = read(report(spec("a"), spec("b", "timedout", cut), spec("c", "timedout", slow)))
    assert {name: one.state for name, one in found.items()} == {"a": "passed", "c": "timedout"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            report(spec("", "failed", "no node is ready", "SynchronizedBeforeSuite"), spec("one", "skipped")),
            "no node is",
        ),
        (report(spec("one", "skipped"), reasons=["interrupted by user"]), "interrupted by user"),
        (report(spec("one", "skipped")), "no spec was chosen"),
    ],
)
def test_report_without_a_spec_that_ran_is_an_error_with_its_reason(text: str, reason: str) -> None:
    with pytest.raises(NoSpecRan, match=reason):
        read(text)


def test_difference_is_a_defect_where_only_ours_does_not_pass() -> None:
    stock = {"a": PASSED, "b": FAILED, "c": PASSED, "d": FAILED, "e": PASSED}
    ours = {"a": FAILED, "b": PASSED, "c": PASSED, "d": FAILED}
    found = differences(stock, ours)
    assert [(one.name, one.ours.state, one.defect) for one in found] == [
        ("a", "failed", True), ("b", "passed", False), ("e", NOT_RUN, True),
    ]  # fmt: skip


def test_what_skips_itself_is_not_unsuccessful() -> None:
    assert unsuccessful({"a": Outcome("timedout"), "b": Outcome("skipped"), "c": FAILED, "d": PASSED}) == ["a", "c"]


def chosen(expression: str, labels: frozenset[str]) -> bool:
    """Evaluate a filter of labels as Ginkgo does."""
    words = {"&&": "and", "||": "or", "!": "not ", "(": "(", ")": ")"}
    parts = re.findall(r"&&|\|\||[!()]|[\w-]+", expression)
    return bool(eval(" ".join(words.get(part, str(part in labels)) for part in parts)))


def test_every_spec_that_is_chosen_is_in_exactly_one_portion() -> None:
    kinds = [("sig-node",), ("sig-storage",), ("sig-apps",), ("sig-network",), ("sig-api-machinery",), ("sig-cli",)]
    marks = [one for size in range(4) for one in itertools.combinations((*specs.LABELS, "Slow"), size)]
    for labels in (frozenset(kind + mark) for kind in kinds for mark in marks):
        portions = [name for name, expression in specs.PORTIONS.items() if chosen(expression, labels)]
        assert len(portions) == bool(labels & {*specs.LABELS}), (labels, portions)


def test_expression_of_a_spec_matches_its_name_alone_and_has_no_escaped_space() -> None:
    name = "[sig-node] Pods (a|b) should run {x} + 1.5 [Conformance]"
    (expression,) = specs.exactly([name])
    assert re.search(expression, f"Kubernetes e2e suite {name}")
    assert not re.search(expression, f"{name} twice")
    assert r"\ " not in expression


def test_table_has_counts_differences_and_what_neither_handler_passes() -> None:
    node = frozenset({"NodeConformance"})
    stock = {"a": Outcome("passed", node), "b": Outcome("failed", node, "it hangs\nfor long"), "d": PASSED}
    ours = {"a": Outcome("failed", node, "other"), "b": Outcome("failed", node), "d": PASSED}
    text = table.render(stock, ours, {"a", "d"})
    assert "| NodeConformance | runc (stock) | 2 | 1 | 1 | 0 |" in text
    assert "| NodeConformance | kybernate | 2 | 0 | 2 | 0 |" in text
    assert "| `a` | passed | failed |" in text
    assert "| `b` | `it hangs` |" in text
    assert text.endswith("| `d` |\n")


def test_table_says_which_portions_ended_early() -> None:
    reasons = shortfalls(report(spec("a"), reasons=["Suite Timeout Elapsed"]))
    assert "| `node by runc` | Suite Timeout Elapsed |" in table.render({}, {}, short={"node by runc": reasons})


def test_repetition_settles_what_differed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "RESULTS", tmp_path)
    (tmp_path / "kybernate").mkdir()
    (tmp_path / "kybernate/node.json").write_text(report(spec("a", "failed", "slow"), spec("b", "failed", "wrong")))
    (tmp_path / "kybernate/again-1.json").write_text(report(spec("a"), spec("b", "failed", "wrong")))
    assert {name: one.state for name, one in conformance.all_outcomes("kybernate").items()} == {
        "a": "passed", "b": "failed",
    }  # fmt: skip
