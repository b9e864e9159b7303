"""Medians of both sides, as JSON lines and tables. Pure functions."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.gpu.against.timeline import Span, slots

SIDES = ("old", "new")
MOST_WORDS = 600  # characters of a reason; the log of the side has all of it


@dataclass(frozen=True)
class Sample:
    """One measurement: of which size, what, on which side, in seconds; its steps, and its spans if it has any."""

    gib: float
    what: str
    side: str
    seconds: float
    steps: Mapping[str, float] = field(default_factory=dict)
    spans: Sequence[Span] = ()

    def line(self) -> str:
        told = {"gib": self.gib, "what": self.what, "side": self.side, "seconds": round(self.seconds, 4)}
        told["steps"] = {name: round(cost, 4) for name, cost in self.steps.items()}
        if self.spans:
            told["spans"] = [[one.who, one.name, round(one.begin, 4), round(one.end, 4)] for one in self.spans]
        return json.dumps(told) + "\n"


@dataclass(frozen=True)
class Compared:
    """Medians of the same thing on both sides, None for a side that has not done it, and how often each did."""

    gib: float
    what: str
    old: float | None
    new: float | None
    n: tuple[int, int]

    @property
    def ratio(self) -> float | None:
        return self.new / self.old if self.new is not None and self.old else None

    def line(self) -> str:
        return json.dumps({**_rounded(vars(self)), "n": list(self.n), "ratio": _round(self.ratio)}) + "\n"


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _round(value) if name in SIDES else value for name, value in values.items()}


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def compared(samples: Sequence[Sample]) -> list[Compared]:
    """Return a comparison of each thing, in the order in which they were measured first."""
    found = []
    for gib, what in dict.fromkeys((one.gib, one.what) for one in samples):
        sides = [[one.seconds for one in _of(samples, gib, what, side)] for side in SIDES]
        old, new = (statistics.median(values) if values else None for values in sides)
        found.append(Compared(gib, what, old, new, (len(sides[0]), len(sides[1]))))
    return found


def _of(samples: Sequence[Sample], gib: float, what: str, side: str) -> list[Sample]:
    return [one for one in samples if (one.gib, one.what, one.side) == (gib, what, side)]


def text(heading: str, samples: Sequence[Sample], failures: Sequence[str], unreached: Sequence[str]) -> str:
    """Return the report: both sides, what failed, what was not reached, and where the time goes."""
    return "\n".join(
        [
            heading,
            "",
            "| GiB | what | old s | new s | new/old | n old | n new |",
            "|---|---|---|---|---|---|---|",
            *(_row(one) for one in compared(samples)),
            "",
            *_list("Failed", failures),
            *_list("Not reached", unreached),
            *_steps(samples),
            *_timelines(samples),
        ]
    )


def _row(one: Compared) -> str:
    costs = " | ".join(_number(value) for value in (one.old, one.new, one.ratio))
    return f"| {one.gib:g} | {one.what} | {costs} | {one.n[0]} | {one.n[1]} |"


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _list(heading: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield from (f"## {heading}", "", *(f"- {_brief(line)}" for line in lines), "")


def _brief(line: str) -> str:
    return " ".join(line.split())[:MOST_WORDS]


def _steps(samples: Sequence[Sample]) -> Iterator[str]:
    yield from (
        "## Steps, medians in ms",
        "",
        "| GiB | what | step | old | new | new - old |",
        "|---|---|---|---|---|---|",
    )
    for gib, what in dict.fromkeys((one.gib, one.what) for one in samples if one.steps):
        sides = [_of(samples, gib, what, side) for side in SIDES]
        for step in dict.fromkeys(name for side in sides for one in side for name in one.steps):
            old, new = (_median_step(side, step) for side in sides)
            more = None if old is None or new is None else new - old
            cells = " | ".join(_number(value, 1) for value in (old, new, more))
            yield f"| {gib:g} | {what} | {step} | {cells} |"
    yield ""


def _median_step(side: Sequence[Sample], step: str) -> float | None:
    return statistics.median(one.steps.get(step, 0.0) for one in side) * 1000 if side else None


def _timelines(samples: Sequence[Sample]) -> Iterator[str]:
    """Yield, for each thing that has spans, what each side did in each 100 ms of its round in the middle."""
    for gib, what in dict.fromkeys((one.gib, one.what) for one in samples if one.spans):
        middles = [_middle([one for one in _of(samples, gib, what, side) if one.spans]) for side in SIDES]
        columns = [slots(one.spans, one.seconds) if one else [] for one in middles]
        yield from (
            f"## {what} of {gib:g} GiB: where each 100 ms goes",
            "",
            "Each number is ms of the slot. In brackets: what works beside the steps of the shim.",
            "",
        )
        yield from ("| from ms | old | new |", "|---|---|---|")
        for number in range(max(map(len, columns))):
            cells = (column[number].replace("|", "\\|") if number < len(column) else "" for column in columns)
            yield f"| {number * 100} | {' | '.join(cells)} |"
        yield ""


def _middle(samples: Sequence[Sample]) -> Sample | None:
    return sorted(samples, key=lambda one: one.seconds)[(len(samples) - 1) // 2] if samples else None
