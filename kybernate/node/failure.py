"""What a user reads when something on the node does not work: what failed and why, the state now, what to do."""

from __future__ import annotations


class Failure(Exception):
    """An expected failure. `str()` says what failed and why; a subclass is one thing that callers can do differently.

    `state` says what is true now, `advice` what to do about it; either may be empty.
    """

    advice = ""

    def __init__(self, message: str, *, state: str = "", advice: str = "") -> None:
        super().__init__(message)
        self.state = state
        self.advice = advice or type(self).advice


class Refused(Failure):
    """It is not permitted, or not possible as things are; nothing was changed."""


class Missing(Failure):
    """What was named does not exist."""


class Invalid(Failure):
    """The request itself is wrong: a retry needs another one."""


class Unavailable(Failure):
    """A program, a service or an optional part that is needed is not there, or does not answer; a retry may succeed."""


class Denied(Failure):
    """The caller may not do this; another one may."""


class Exhausted(Failure):
    """The caller, or the node, has as many of these as it may: a retry succeeds when one of them has ended."""


class Claimed(Failure):
    """Another request has what this one names: a key, or a place."""


class Ambiguous(Failure):
    """A name means several things; the message lists them by names that mean one each."""


class NoImage(Failure):
    """There is no complete image of that name or id, at the place or in the tier."""


class TimedOut(Failure):
    """It was not answered, or had not ended, in its time."""
