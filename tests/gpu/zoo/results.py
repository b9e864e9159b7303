"""What the zoo's programs have come through, as JSON lines and as tables in the form of RESULTS.md. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from tests.gpu.zoo.passage import FAILED, NOT_REACHED, PASSED, Passage
from tests.gpu.zoo.table import REFUSED, WORKS

MIB = 1 << 20


def lines(passage: Passage) -> str:
    """Return a JSON line for each step."""
    return "".join(
        json.dumps(
            {
                "program": passage.entry.name,
                "way": passage.way,
                "step": outcome.step,
                "result": outcome.result,
                "seconds": round(outcome.seconds, 3),
                "arena_mib": outcome.arena_bytes // MIB,
                "why": outcome.why,
            }
        )
        + "\n"
        for outcome in passage.outcomes
    )


def text(heading: str, passages: Sequence[Passage], left_out: Mapping[str, str]) -> str:
    """Return the report: a verdict for each program and way, seconds by step, and what was not run."""
    counts = {one: sum(passage.result == one for passage in passages) for one in {p.result for p in passages}}
    told = ", ".join(f"{count} {result}" for result, count in sorted(counts.items(), key=lambda one: -one[1]))
    return "\n".join(
        [
            heading,
            "",
            f"{len(passages)} passages: {told}." if passages else "Nothing was run.",
            "",
            *_verdicts(passages),
            *_seconds("Seconds by step, with the check that it computes on", WORKS, passages),
            *_seconds("Refused by pre-flight, as they must be", REFUSED, passages),
            *_left_out(left_out),
        ]
    )


def _verdicts(passages: Sequence[Passage]) -> Iterator[str]:
    yield from ("| program | way | result | seconds | MiB by the arena | why |", "|---|---|---|---|---|---|")
    for passage in passages:
        by_arena = max((outcome.arena_bytes for outcome in passage.outcomes), default=0) // MIB
        why = "; ".join(filter(None, [passage.why, difference(passage, passages)])).replace("|", "\\|")
        told = f"{passage.entry.name} | {passage.way} | {passage.result} | {passage.seconds:.1f}"
        yield f"| {told} | {by_arena or ''} | {why} |"
    yield ""


def difference(passage: Passage, passages: Sequence[Passage]) -> str:
    """Say where the figures with the arena are not those without it; each alone may still be what it was."""
    others = [other for other in passages if other.entry.name == passage.entry.name and other.way == "plain"]
    if passage.way == "arena" and others and passage.figures and others[0].figures:
        return "" if others[0].figures == passage.figures else "other figures than without the arena"
    return ""


def _seconds(heading: str, steps: Sequence[str], passages: Sequence[Passage]) -> Iterator[str]:
    rows = [passage for passage in passages if tuple(passage.entry.steps) == tuple(steps)]
    if not rows:
        return
    yield from (f"## {heading}", "", f"| program | way | {' | '.join(steps)} |", "|---|---|" + "---|" * len(steps))
    for passage in rows:
        cells = (
            f"{outcome.seconds:.2f}" if outcome.result == PASSED else _mark(outcome.result)
            for outcome in passage.outcomes
        )
        yield f"| {passage.entry.name} | {passage.way} | {' | '.join(cells)} |"
    yield ""


def _mark(result: str) -> str:
    return {FAILED: "**failed**", NOT_REACHED: ""}.get(result, result)


def _left_out(left_out: Mapping[str, str]) -> Iterator[str]:
    if left_out:
        yield from ("## Not run", "")
        yield from (f"- {name}: {why}" for name, why in left_out.items())
        yield ""
