"""What a model needs next: from nothing to a program that answers, with a template to come back from. Without I/O.

A model's program is started once, warmed, and checkpointed: the template. Afterwards it comes back from that, after a
crash or a reboot, without loading its weights again. A restore that finds no room is tried again; only a template that
does not restore here, whatever room there is, is left aside, and the program starts from the beginning.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

BACKOFF: Final = (0.0, 1.0, 5.0, 15.0, 60.0)  # seconds before the next start, by the starts that failed in a row
STEADY_SECONDS: Final = 60.0  # a program that has run for so long has started well
RESTORES_UNEXPLAINED: Final = 3  # in a row, until the template is taken for what fails
# What failed restores say, of the shim and of the driver. Codes do not arrive: containerd passes most on as "unknown".
ROOM_SIGNS: Final = ("MiB are needed", "CUDA_ERROR_OUT_OF_MEMORY", "resource exhausted", "No space left on device")
AWAY_SIGNS: Final = ("the node's agent", "CUDA helper", "did not end within", "deadline exceeded", "ttrpc: closed")


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


class Cause(StrEnum):
    """Why a restore failed."""

    ROOM = "room"  # there is not enough of it now
    AWAY = "away"  # containerd, the agent or the driver's helper
    TEMPLATE = "template"  # it is damaged, or of another driver or GPU
    UNKNOWN = "unknown"


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
    unexplained: int = 0  # restores in a row that failed for an unknown cause
    short: bool = False  # its last start found no room
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


def cause_of(said: str, *, away: bool = False, short: bool = False, damaged: bool = False, before: int = 0) -> Cause:
    """Return why a restore failed that `said` this; `before` unexplained ones failed in a row.

    `away`: what should have done it did not answer. `short`: the driver has less memory free than it needs. `damaged`:
    the bytes of its template are not those that were written.
    """
    if away:
        return Cause.AWAY
    if short or any(sign in said for sign in ROOM_SIGNS):
        return Cause.ROOM
    if any(sign in said for sign in AWAY_SIGNS):
        return Cause.AWAY
    return Cause.TEMPLATE if damaged or before + 1 >= RESTORES_UNEXPLAINED else Cause.UNKNOWN


def after_failed_restore(done: Done, cause: Cause) -> Done:
    """Return what is known after a restore failed: the template is given up for its own fault alone."""
    if cause is Cause.TEMPLATE:
        return replace(done, stale=True, unexplained=0, short=False)
    unexplained = done.unexplained + 1 if cause is Cause.UNKNOWN else done.unexplained
    return replace(done, failures=done.failures + 1, unexplained=unexplained, short=cause is Cause.ROOM)


def failures_after(done: Done, started: float, ended: float) -> int:
    """Return the starts that failed in a row once a program has ended: one more, or 1 where it had run steadily."""
    return 1 if done.healthy and ended - started >= STEADY_SECONDS else done.failures + 1
