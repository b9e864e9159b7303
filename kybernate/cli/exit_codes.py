"""The exit codes of `kybernate`, so that a script can tell why a command has failed. docs/output.md has the table.

A failure is looked up by the name of its class, whether it arose here or is what the agent reports of a call or of an
operation. So no class has to be loaded, and both ways of a command end alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Final


class ExitCode(IntEnum):
    """How a command has ended. A restore in the foreground ends with the exit code of its container instead."""

    DONE = 0
    FAILED = 1  # it was tried and did not succeed, or an examination has found a fault
    USAGE = 2  # the command line cannot be understood
    NOT_FOUND = 3  # the container, image, operation, key or context does not exist
    REFUSED = 4  # not permitted, or not possible as things are; nothing was changed
    TIMED_OUT = 5  # a deadline has passed
    UNAVAILABLE = 6  # the agent, containerd, a shim, the store or the registry cannot be reached
    INTERRUPTED = 130  # by SIGINT, as shells count it


# By the names of classes; the row of a parent holds for what derives from it. Everything else is FAILED.
NAMES: Final[Mapping[ExitCode, tuple[str, ...]]] = {
    ExitCode.USAGE: ("Invalid",),
    ExitCode.NOT_FOUND: ("Missing", "NoImage"),
    ExitCode.REFUSED: (
        "Ambiguous", "Claimed", "Denied", "Exhausted", "NotKybernate",
        "NothingToCancel", "QuotaReached", "Refused", "ShimTooOld", "StoreDenied",
    ),
    ExitCode.TIMED_OUT: ( "TimedOut", "NotFinished",),
    ExitCode.UNAVAILABLE: (
        "AgentUnreachable", "ContainerdUnreachable", "JournalUnusable", "PeerFailed", "ShimGone", "StoreUnreachable",
        "Unavailable",
    ),
    ExitCode.INTERRUPTED: ("Interrupted",),
}  # fmt: skip
# By gRPC's names of codes, for an answer of an agent, containerd or a shim that names no failure of ours.
CODES: Final[Mapping[str, ExitCode]] = {
    "NOT_FOUND": ExitCode.NOT_FOUND,
    "ALREADY_EXISTS": ExitCode.REFUSED,
    "FAILED_PRECONDITION": ExitCode.REFUSED,
    "INVALID_ARGUMENT": ExitCode.USAGE,
    "PERMISSION_DENIED": ExitCode.REFUSED,
    "RESOURCE_EXHAUSTED": ExitCode.REFUSED,
    "UNAUTHENTICATED": ExitCode.REFUSED,
    "UNIMPLEMENTED": ExitCode.REFUSED,
    "DEADLINE_EXCEEDED": ExitCode.TIMED_OUT,
    "UNAVAILABLE": ExitCode.UNAVAILABLE,
}


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the exit code of an expected failure."""
    by_name = {name: code for code, names in NAMES.items() for name in names}
    known = next((by_name[name] for name in _names(error) if name in by_name), None)
    if known is not None:
        return known
    return CODES.get(getattr(error, "code", ""), ExitCode.FAILED)


def _names(error: BaseException) -> Iterator[str]:
    """Yield what the failure may be called: what the agent has reported first."""
    if reported := getattr(error, "type", ""):
        yield reported
    for kind in type(error).__mro__:
        yield kind.__name__
