"""How far running operations are: finished steps, the running one, and an estimate of what is left.

Watchers see that a few times a second at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kybernate.verbs.model import Operation, Progress, Report, Step

SHOW_SECONDS = 0.25  # between two messages about the progress of one operation


@dataclass(frozen=True)
class Track:
    """What was heard of an operation that began at `began`. The running step began at `since`. Seconds since 1970."""

    began: float
    since: float
    report: Report = field(default_factory=lambda: Report(""))
    steps: tuple[Step, ...] = ()

    def heard(self, report: Report, now: float) -> Track:
        """Return the track after a report. A step ends where another one begins."""
        if report.step == self.report.step:
            return replace(self, report=report)
        steps = (*self.steps, self._ended(now)) if self.report.step else self.steps
        return Track(self.began, now, report, steps)

    def progress(self, now: float) -> Progress:
        """Return what a caller sees at `now`. The clock may have been set back: no duration is negative."""
        report = self.report
        return Progress(
            step=report.step,
            done_bytes=report.done_bytes,
            total_bytes=report.total_bytes,
            seconds=max(0.0, now - self.began),
            seconds_left=seconds_left(report.done_bytes, report.total_bytes, now - self.since),
            waits_for=report.note,
        )

    def _ended(self, now: float) -> Step:
        return Step(self.report.step, max(0.0, now - self.since), self.report.done_bytes)


def seconds_left(done: int, total: int, seconds: float) -> float:
    """Return how long the rest takes at the rate so far; 0 where that is unknown, or nothing is left."""
    if seconds <= 0 or done <= 0 or total <= done:
        return 0.0
    return (total - done) * seconds / done


class Tracks:
    """The tracks of operations by id. `show` is called with an id when its progress is to be seen."""

    def __init__(self, clock: Callable[[], float], show: Callable[[str], None]) -> None:
        self._clock = clock
        self._show = show
        self._tracks: dict[str, Track] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._shown: dict[str, float] = {}

    def begin(self, id: str, now: float) -> None:
        self._tracks[id] = Track(now, now)

    def heard(self, operation: Operation, report: Report) -> None:
        """Note a report, and show it now or soon."""
        id, now = operation.id, self._clock()
        began = operation.started or now
        self._tracks[id] = self._tracks.get(id, Track(began, now)).heard(report, now)
        loop = asyncio.get_running_loop()
        due = self._shown.get(id, 0.0) + SHOW_SECONDS - loop.time()
        if due <= 0:
            self._show_now(id)
        elif id not in self._timers:
            self._timers[id] = loop.call_later(due, self._show_now, id)

    def steps(self, id: str) -> Sequence[Step]:
        """Return the steps that were reported."""
        return self._tracks[id].steps if id in self._tracks else ()

    def with_progress(self, operation: Operation) -> Operation:
        track = self._tracks.get(operation.id)
        if track is None or operation.final:
            return operation
        return replace(operation, steps=track.steps, progress=track.progress(self._clock()))

    def drop(self, id: str) -> None:
        self._tracks.pop(id, None)
        self._shown.pop(id, None)
        if timer := self._timers.pop(id, None):
            timer.cancel()

    def close(self) -> None:
        """Show nothing any more."""
        for timer in self._timers.values():
            timer.cancel()

    def _show_now(self, id: str) -> None:
        self._timers.pop(id, None)
        self._shown[id] = asyncio.get_running_loop().time()
        self._show(id)
