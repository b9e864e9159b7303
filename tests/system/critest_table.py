"""What became of critest's specs by each handler, and where handlers differ: functions of the reports of Ginkgo.

Source: Ginkgo 2, package reporters, junit_report.go: a test case is named by its kind and its full text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from xml.etree import ElementTree

KIND = "[It] "  # of test cases that are specs; others are what runs before and after all
NOT_RUN = "not run"
Outcomes = Mapping[str, str]  # how each spec has ended, by its full text


def read(report: str) -> dict[str, str]:
    """Return the outcome of each spec of a report in JUnit's format, "passed", "failed" or "skipped" for example."""
    cases = [case.attrib for case in ElementTree.fromstring(report).iter("testcase")]
    return {case["name"].removeprefix(KIND): case["status"] for case in cases if case["name"].startswith(KIND)}


def differing(found: Mapping[str, Outcomes]) -> list[str]:
    """Return the specs that have not ended in the same way by all handlers, those included that some have not run."""
    specs = sorted({spec for outcomes in found.values() for spec in outcomes})
    return [spec for spec in specs if len({outcomes.get(spec, NOT_RUN) for outcomes in found.values()}) > 1]


def render(found: Mapping[str, Outcomes], repeated: Iterable[str] = ()) -> str:
    """Return, as Markdown, counts for each handler, what differs, what fails by all, and what did not differ again."""
    kinds = ("passed", "failed", "skipped")
    rows = []
    for handler, outcomes in found.items():
        counts = Counter(outcomes.values())
        others = counts.total() - counts["passed"] - counts["skipped"]
        rows.append([f"`{handler}`", str(counts.total()), str(counts["passed"]), str(others), str(counts["skipped"])])
    differ = differing(found)
    table = [[_code(spec), *(outcomes.get(spec, NOT_RUN) for outcomes in found.values())] for spec in differ]
    first = next(iter(found.values()), {})
    fail = [spec for spec, how in sorted(first.items()) if how not in ("passed", "skipped") and spec not in differ]
    again = [[_code(spec)] for spec in sorted(repeated) if spec not in differ]
    return "\n".join([
        _table(["handler", "specs", *kinds], rows),
        _section("Specs whose outcome differs", ["spec", *(f"`{handler}`" for handler in found)], table),
        _section("Specs that fail by all handlers", ["spec"], [[_code(spec)] for spec in fail]),
        _section("Specs that differed and did not when all handlers repeated them", ["spec"], again),
    ])  # fmt: skip


def _section(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"{title}: {len(rows)}\n\n{_table(head, rows)}" if rows else f"{title}: none\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rows))


def _code(spec: str) -> str:
    return f"`{spec.replace('|', chr(92) + '|')}`"
