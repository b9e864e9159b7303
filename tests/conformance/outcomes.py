"""What became of each spec, and where two handlers differ: functions of the reports that Ginkgo writes.

Source: the JSON report of Ginkgo 2 (package types, Report and SpecReport).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

NOT_RUN = "not run"
CUT_OFF = ("A suite timeout occurred", "Interrupted by User")  # the end of the whole suite, not of a spec's time


class NoSpecRan(Exception):
    """A report has no spec that ran: the suite did not start, or nothing was chosen."""


@dataclass(frozen=True)
class Outcome:
    """How a spec ended ("passed", "failed", "skipped", "timedout" …), and what it said if it did not pass."""

    state: str
    labels: frozenset[str] = frozenset()
    message: str = ""

    @property
    def passed(self) -> bool:
        return self.state == "passed"


@dataclass(frozen=True)
class Difference:
    """A spec that ended in one way by the stock handler, and in another by ours."""

    name: str
    stock: Outcome
    ours: Outcome

    @property
    def defect(self) -> bool:
        return self.stock.passed


def read(report: str) -> dict[str, Outcome]:
    """Return the outcome of each spec that was chosen, by its full name. Raises NoSpecRan with the reason if none was.

    What the choice left out is in the report as well, as skipped without a word; and so is, as failed, what still ran
    when the suite's time was over. `shortfalls` says so.
    """
    found: dict[str, Outcome] = {}
    reasons = shortfalls(report)
    for suite in json.loads(report):
        for spec in suite["SpecReports"] or []:
            message = (spec.get("Failure") or {}).get("Message", "")
            if spec["LeafNodeType"] != "It":
                reasons += [message] * bool(message)
            elif (message or spec["State"] != "skipped") and not message.startswith(CUT_OFF):
                found[_name(spec)] = Outcome(spec["State"], frozenset(_labels(spec)), message)
    if not found:
        raise NoSpecRan("; ".join(reasons) or "no spec was chosen")
    return found


def shortfalls(report: str) -> list[str]:
    """Return why a suite ended before all of its specs had run, as Ginkgo says it; nothing where they had."""
    return [reason for suite in json.loads(report) for reason in suite.get("SpecialSuiteFailureReasons") or []]


def _name(spec: Mapping[str, Any]) -> str:
    return " ".join([*(spec.get("ContainerHierarchyTexts") or []), spec["LeafNodeText"]])


def _labels(spec: Mapping[str, Any]) -> Iterator[str]:
    for labels in spec.get("ContainerHierarchyLabels") or []:
        yield from labels or []
    yield from spec.get("LeafNodeLabels") or []


def differences(stock: Mapping[str, Outcome], ours: Mapping[str, Outcome]) -> list[Difference]:
    """Return each spec whose outcome differs, in the order of their names."""
    missing = Outcome(NOT_RUN)
    pairs = [(name, stock.get(name, missing), ours.get(name, missing)) for name in sorted({*stock, *ours})]
    return [Difference(name, one, other) for name, one, other in pairs if one.state != other.state]


def unsuccessful(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Return the specs that ran and did not pass."""
    return sorted(name for name, outcome in outcomes.items() if outcome.state not in ("passed", "skipped"))


def counts(outcomes: Mapping[str, Outcome], label: str) -> Counter[str]:
    """Return how many specs of a label ended in which way."""
    return Counter(outcome.state for outcome in outcomes.values() if label in outcome.labels)
