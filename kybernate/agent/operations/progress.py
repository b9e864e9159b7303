"""How far a running operation is: its finished steps, the running one, and an estimate of what is left. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kybernate.verbs.model import Progress, Report, Step


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
