"""Refuses requests that no operation can have, before anything is looked at or written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields

from kybernate.agent.operations.errors import RequestInvalid
from kybernate.agent.operations.model import (
    PRIORITIES,
    Arguments,
    Checkpoint,
    Copy,
    Delete,
    Evict,
    Export,
    Import,
    Restore,
    Resume,
    Submission,
    Suspend,
    Swap,
    Verify,
)

MOST_KEY = 256  # characters
MOST_LABELS = 64
MOST_LABEL = 1024  # characters, of a label's name and of its value
MOST_TEXT = 4096  # characters, as of a path
MOST_SECONDS = 365 * 86400.0
TCP = ("", "close", "established")
NEEDED: Mapping[type[Arguments], tuple[str, ...]] = {
    Checkpoint: ("name",),
    Restore: ("image",),
    Suspend: ("name",),
    Resume: ("name",),
    Swap: ("leaving", "coming"),
    Verify: ("image",),
    Delete: ("image",),
    Import: ("path",),
    Export: ("image", "path"),
    Copy: ("image", "tier"),
    Evict: ("image", "tier"),
}


def require_valid(submission: Submission) -> None:
    """Raises RequestInvalid, with the field."""
    _require(len(submission.key) <= MOST_KEY, "idempotency_key", f"has more than {MOST_KEY} characters")
    _require(len(submission.labels) <= MOST_LABELS, "labels", f"are more than {MOST_LABELS}")
    for pair in submission.labels.items():
        _require(all(len(text) <= MOST_LABEL for text in pair), "labels", f"have more than {MOST_LABEL} characters")
    _require_seconds("deadline", submission.seconds)
    _require_arguments(submission)


def _require_arguments(submission: Submission) -> None:
    arguments = submission.arguments
    for field in fields(arguments):
        value = getattr(arguments, field.name)
        if isinstance(value, str):
            _require(len(value) <= MOST_TEXT, field.name, f"has more than {MOST_TEXT} characters")
            _require("\0" not in value, field.name, "has a character that no name has")
            _require(bool(value) or field.name not in NEEDED[type(arguments)], field.name, "is empty")
        elif isinstance(value, float | int):
            _require_seconds(field.name, float(value))
    if isinstance(arguments, Checkpoint):
        _require(arguments.tcp in TCP, "tcp", "is neither `close` nor `established`")
    if isinstance(arguments, Copy):
        _require(arguments.priority in PRIORITIES, "priority", f"is none of {', '.join(PRIORITIES)}")
    if isinstance(arguments, Swap):
        _require(arguments.leaving != arguments.coming, "coming", "is the same container as `leaving`")


def _require_seconds(name: str, seconds: float) -> None:
    _require(math.isfinite(seconds) and 0 <= seconds <= MOST_SECONDS, name, "is no number of seconds up to a year")


def _require(holds: bool, field: str, fault: str) -> None:
    if not holds:
        raise RequestInvalid(f"{field} {fault}", state="no operation was begun")
