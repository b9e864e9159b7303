"""The result of a run as Markdown, as docs/kubernetes-conformance.md has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from tests.conformance import outcomes, specs
from tests.conformance.outcomes import Outcome


def render(
    stock: Mapping[str, Outcome],
    ours: Mapping[str, Outcome],
    repeated: Iterable[str] = (),
    short: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> str:
    """Return counts for each label and handler, what differs, what neither passes, and what was repeated.

    `short`: the portions that ended before all of their specs had run, with the reasons.
    """
    handlers = {"runc (stock)": stock, "kybernate": ours}
    parts = [_counts(handlers)]
    differing = outcomes.differences(stock, ours)
    rows = [(f"`{one.name}`", one.stock.state, one.ours.state) for one in differing]
    parts.append(_section("Specs whose outcome differs", ("spec", *handlers), rows))
    both = sorted({*outcomes.unsuccessful(stock)} & {*outcomes.unsuccessful(ours)})
    said = [(f"`{name}`", f"`{_first_line(stock[name].message)}`") for name in both]
    parts.append(_section("Specs that fail by both handlers", ("spec", "what it says"), said))
    settled = sorted(set(repeated) - {one.name for one in differing})
    parts.append(
        _section(
            "Specs that differed or were cut off, and did not differ when both repeated them",
            ("spec",),
            [(f"`{name}`",) for name in settled],
        )
    )
    cut = [(f"`{name}`", "; ".join(reasons)) for name, reasons in short.items()]
    parts += [_section("Portions that ended early", ("portion", "reason"), cut)] * bool(cut)
    return "\n".join(parts)


def _counts(handlers: Mapping[str, Mapping[str, Outcome]]) -> str:
    rows = []
    for label in specs.LABELS:
        for name, found in handlers.items():
            number = outcomes.counts(found, label)
            failed = sum(number.values()) - number["passed"] - number["skipped"]
            rows.append(
                (label, name, str(sum(number.values())), str(number["passed"]), str(failed), str(number["skipped"]))
            )
    return _table(("label", "handler", "specs", "passed", "failed", "skipped by themselves"), rows)


def _section(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"{title}: {len(rows)}\n\n{_table(head, rows)}" if rows else f"{title}: none\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"


def _first_line(message: str) -> str:
    return (message.strip().splitlines() or [""])[0][:160].replace("`", "'")
