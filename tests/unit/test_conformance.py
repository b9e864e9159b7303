"""The comparison of two handlers by Kubernetes' end-to-end tests, from the reports that Ginkgo writes."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import __main__ as conformance
from tests.conformance import progress, specs, table
from tests.conformance.outcomes import NOT_RUN, NoSpecRan, Outcome, differences, read, shortfalls, unsuccessful
from tests.lab import cli

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


LOG = """lab conformance: ready after 10.0 s
Running Suite: Kubernetes e2e suite - /usr/local/lib/e2e
Will run 9 of 3206 specs
Running in parallel across 8 processes
SSS••SS•S
------------------------------
• [FAILED] [89.121 seconds]
[sig-node] Pods should run [Conformance]
  • not a mark
------------------------------
S [SKIPPED] [0.5 seconds]
------------------------------
• [TIMEDOUT] [300.0 seconds]
------------------------------
SS•"""


def test_progress_counts_the_specs_that_were_chosen() -> None:
    assert str(progress.read(LOG)) == "7 of 9 specs, 2 failed"
    assert str(progress.read(LOG[: LOG.index("------")])) == "3 of 9 specs"
    assert str(progress.read(LOG[:100])) == str(progress.read("")) == "starts"


class Lab:
    """What runs specs, in place of the lab: each report has one spec, named as its portion."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commit, self.versions, self.results = "one", "Kubernetes v1", root / "build/conformance"
        monkeypatch.setattr(conformance, "ROOT", root)
        monkeypatch.setattr(conformance, "RESULTS", self.results)
        monkeypatch.setattr(conformance, "PROGRESS_SECONDS", 0)
        monkeypatch.setattr(conformance, "commit_here", lambda: self.commit)
        monkeypatch.setattr(conformance.subprocess, "call", self.build)
        monkeypatch.setattr(conformance.subprocess, "run", self.run)
        self.built: list[argparse.Namespace] = []

    def build(self, argv: list[str], **options: Any) -> int:
        self.built.append(cli.parse(argv[2:]))
        return 0

    def run(self, argv: list[str], **options: Any) -> None:
        parsed = cli.parse(argv[2:])
        assert parsed.nodes == 1
        place = self.results / Path(parsed.command[3]).relative_to("/src/build/conformance")
        place.with_suffix(".versions").write_text(f"{self.versions}\n")
        place.write_text(report(spec(place.stem)))


def reports(lab: Lab) -> list[str]:
    return sorted(str(file.relative_to(lab.results)) for file in lab.results.glob("[kr]*/*.json"))


def test_reports_of_another_commit_or_of_other_programs_are_no_part_of_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NODES", "4")  # of `make test`, which is none of a cluster
    lab = Lab(tmp_path, monkeypatch)
    assert conformance.main(["node", "apps"]) == 0
    assert [(one.lane, one.build_only, one.nodes) for one in lab.built] == [("conformance", True, 1)]
    assert conformance.main(["network"]) == 0
    assert reports(lab) == [
        f"{handler}/{name}.json" for handler in ("kybernate", "runc") for name in ("apps", "network", "node")
    ]
    assert "left out" not in capsys.readouterr().out
    lab.versions = "Kubernetes v2"
    assert conformance.main(["apps"]) == 0
    said = capsys.readouterr().out
    assert (
        "because their programs have other versions: network by runc, node by runc, network by kybernate, node by"
        in said
    )
    assert reports(lab) == ["kybernate/apps.json", "runc/apps.json"]
    lab.commit = "two"
    assert conformance.main(["--focus", "Probing"]) == 0
    assert "because they are of another commit: apps by runc, apps by kybernate\n" in capsys.readouterr().out
    assert reports(lab) == ["kybernate/focus.json", "runc/focus.json"]
    assert conformance.main([]) == 0
    assert reports(lab) == sorted(
        f"{handler}/{name}.json" for handler in ("kybernate", "runc") for name in specs.PORTIONS
    )


def test_lab_that_cannot_build_the_specs_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path, monkeypatch)
    monkeypatch.setattr(conformance.subprocess, "call", lambda argv, **options: 125)
    assert conformance.main(["node"]) == 125
    assert reports(lab) == []


def test_progress_is_said_while_specs_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = Lab(tmp_path, monkeypatch)
    said = threading.Event()
    written = threading.Barrier(2)

    def run(argv: list[str], *, stdout: Any, **options: Any) -> None:
        stdout.write(LOG)
        stdout.flush()
        written.wait(60)
        assert said.wait(60)
        lab.run(argv)

    def show(*words: str, **options: Any) -> None:
        if "node: runc 7 of 9 specs, 2 failed; kybernate 7 of 9 specs, 2 failed" in words:
            said.set()

    monkeypatch.setattr(conformance.subprocess, "run", run)
    monkeypatch.setattr(conformance, "print", show, raising=False)
    assert conformance.main(["node"]) == 0
    assert said.is_set()
