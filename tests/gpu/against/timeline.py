"""What was done when, in a restore until the program computes: from logs of the shim, the helper and CRIU. Pure.

The shim's calls and steps follow each other; the helper and CRIU work in parallel with them, or inside of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple

SLOT = 0.1  # seconds of a row
LEAST = 0.1  # of a slot, that something must take to be named
SILENCE = 0.03  # seconds between two lines of CRIU's log that are worth a name
MOST_WORDS = 40  # characters of the line before
STAMPED = re.compile(r"^\((\d+\.\d+)\)\s*(.*)$", re.MULTILINE)
START = "Start"  # the call that restores
CRIU_STEP = "restore"  # of that call, in which CRIU works
BETWEEN = "between the steps"


class Span(NamedTuple):
    """Something that was done, in seconds since the restore was asked for. `who` is "shim", "helper" or "criu"."""

    who: str
    name: str
    begin: float
    end: float


def spans(
    shim: Sequence[Mapping[str, Any]],
    helper: Sequence[Mapping[str, Any]],
    criu: tuple[float, str] | None,
    began: float,
    seconds: float,
) -> list[Span]:
    """Return what the events of one restore say, and `criu`: when its log ended, and the log. Times are of the epoch.

    The shim's spans cover all of the `seconds`.
    """
    found = [*_of_shim(shim, began, seconds, criu[0] - began if criu else 0.0), *_of_helper(helper, began)]
    return [*found, *_of_criu(*criu, began)] if criu is not None else found


def _of_shim(events: Sequence[Mapping[str, Any]], began: float, seconds: float, criu_ended: float) -> Iterator[Span]:
    """Yield calls and steps. The step of CRIU has not ended before CRIU: what no step is lies before it until then."""
    named = {event["event"]: event for event in events}
    calls = {event["call"]: event for event in events if event["event"] == "call.traced"}
    created, restored = (_at(named[name], began) for name in ("task.created", "task.restored"))
    before = created - _either(calls["Create"], "total_ms", "ms") / 1000 if "Create" in calls else 0.0
    yield Span("shim", "ctr, containerd, start", 0.0, before)
    yield Span("shim", "Create", before, created)
    told = _either(named["task.restored"], "step_seconds", "seconds")
    start = (
        _at(calls[START], began) - _either(calls[START], "total_ms", "ms") / 1000
        if START in calls
        else restored - sum(told.values())
    )
    yield Span("shim", "containerd", created, start)
    now, unnoted = start, max(0.0, restored - start - sum(told.values()))
    for name, cost in told.items():
        if name == CRIU_STEP and (missing := min(max(0.0, criu_ended - now - cost), unnoted)):
            yield Span("shim", BETWEEN, now, now := now + missing)
        yield Span("shim", name, now, now := now + cost)
    yield Span("shim", BETWEEN, now, max(now, restored))
    yield Span("shim", "until it computes", max(now, restored), seconds)


def _either(event: Mapping[str, Any], name: str, older: str) -> Any:
    """Return a field by its name, or by the one that older releases, with which this one is compared, give it."""
    return event[name] if name in event else event[older]


def _of_helper(events: Sequence[Mapping[str, Any]], began: float) -> Iterator[Span]:
    for event in events:
        if "seconds" in event and (end := _at(event, began)) >= 0:
            yield Span("helper", event["event"], end - event["seconds"], end)


def _of_criu(ended: float, log: str, began: float) -> Iterator[Span]:
    """Yield all of CRIU's time, and each of its silences, by the words before it."""
    lines = [(float(found[1]), found[2]) for found in STAMPED.finditer(log)]
    if not lines:
        return
    zero = ended - lines[-1][0] - began
    yield Span("criu", "restores", zero, ended - began)
    for (begin, words), (end, _) in pairwise(lines):
        if end - begin >= SILENCE:
            yield Span("criu", f"after {words[:MOST_WORDS]!r}", zero + begin, zero + end)


def _at(event: Mapping[str, Any], began: float) -> float:
    return datetime.fromisoformat(event["time"]).timestamp() - began


def slots(found: Sequence[Span], seconds: float) -> list[str]:
    """Return, for each 100 ms, what was done in it and for how many of them: the shim's first, each in order."""
    return [_slot(found, number * SLOT) for number in range(max(1, -(-int(seconds * 1000) // int(SLOT * 1000))))]


def _slot(found: Sequence[Span], begin: float) -> str:
    costs: dict[str, float] = {}
    for span in sorted(found, key=lambda one: one.who != "shim"):
        inside = min(span.end, begin + SLOT) - max(span.begin, begin)
        if inside > 0:
            name = span.name if span.who == "shim" else f"({span.who} {span.name})"
            costs[name] = costs.get(name, 0) + inside
    return ", ".join(f"{name} {cost * 1000:.0f}" for name, cost in costs.items() if cost >= LEAST * SLOT)
