"""What a model needs next: from nothing to a program that answers, with a template to come back from. Without I/O.

A model's program is started once, warmed, and checkpointed: the template. Afterwards it comes back from that, after a
crash or a reboot, without loading its weights again. A template that does not restore is left aside, and the program
starts from the beginning.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

BACKOFF: Final = (0.0, 1.0, 5.0, 15.0, 60.0)  # seconds before the next start, by the starts that failed in a row
STEADY_SECONDS: Final = 60.0  # a program that has run for so long has started well


class Step(StrEnum):
    """What is done next for a model; the words are those of its state in lists."""

    PULL = "pulling"
    REMOVE = "removing"
    START = "starting"
    RESTORE = "restoring"
    AWAIT = "loading"
    WARM = "warming"
    TEMPLATE = "saving"
    SLEEP = "suspending"
    WAIT = "backing off"
    PARKED = "on disk"
    NONE = "ready"


@dataclass(frozen=True)
class Seen:
    """What there is of a model. `started` and `ended` are the container's, in seconds since 1970, 0 without one."""

    image: bool = False  # the container image is here
    pod: bool = False
    same: bool = False  # as the file says now
    running: bool = False
    started: float = 0.0
    ended: float = 0.0
    template: bool = False  # there is one of what the file says now


@dataclass(frozen=True)
class Done:
    """What was done since the program of the model started: lost with `kybernate up`, and then asked for again."""

    healthy: bool = False
    warmed: bool = False
    settled: bool = False  # suspended, or found at work after a restart of `kybernate up`
    parked: bool = False  # its program has ended, and comes back from its template when it is asked
    failures: int = 0  # starts in a row that did not become healthy, or that ended soon
    stale: bool = False  # its template does not restore here: another one takes its place
    template_failed: bool = False  # could not be written


@dataclass(frozen=True)
class Next:
    """The next step; `seconds` until it may begin, for WAIT alone."""

    step: Step
    seconds: float = 0.0


def decide(seen: Seen, done: Done, now: float, *, warm_up: bool, template: bool) -> Next:
    """Return a model's next step."""
    whole = seen.template and not done.stale
    if done.parked:
        return Next(Step.REMOVE if seen.pod else Step.PARKED)
    if not seen.image:
        return Next(Step.PULL)
    if seen.pod and not (seen.same and seen.running):
        return Next(Step.REMOVE)
    if not seen.pod:
        wait = BACKOFF[min(done.failures, len(BACKOFF) - 1)]
        if done.failures and (left := seen.ended + wait - now) > 0:
            return Next(Step.WAIT, left)
        return Next(Step.RESTORE if template and whole and not done.template_failed else Step.START)
    if not done.healthy:
        return Next(Step.AWAIT)
    if warm_up and not done.warmed and not whole:
        return Next(Step.WARM)
    if template and not whole and not done.template_failed:
        return Next(Step.TEMPLATE)
    return Next(Step.NONE if done.settled else Step.SLEEP)


def failures_after(done: Done, started: float, ended: float) -> int:
    """Return the starts that failed in a row once a program has ended: one more, or 1 where it had run steadily."""
    return 1 if done.healthy and ended - started >= STEADY_SECONDS else done.failures + 1
