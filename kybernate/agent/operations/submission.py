"""What a submission must be before anything is looked up or written, and the id of the operation that it becomes."""

from __future__ import annotations

import os
from typing import Final

from kybernate.verbs.model import Submission
from kybernate.verbs.verb import Verb, require, require_seconds

OPERATION_NOT_FOUND_ADVICE: Final = "`kybernate ops` lists the operations"
TOO_MANY_OPERATIONS_ADVICE: Final = "wait until some of them have ended, or cancel them; `kybernate ops` lists them"
AGENT_STOPPING_ADVICE: Final = "repeat the request, with the same idempotency key, when the agent runs again"
MOST_KEY = 256  # characters
MOST_LABELS = 64
MOST_LABEL = 1024  # characters, of a label's name and of its value
MILLISECONDS = 11  # hexadecimal digits of an id: until the year 2527
RANDOM_BYTES = 5


def require_valid(submission: Submission) -> None:
    """Raise Invalid, with the field."""
    require(len(submission.key) <= MOST_KEY, "idempotency_key", f"has more than {MOST_KEY} characters")
    require(len(submission.labels) <= MOST_LABELS, "labels", f"are more than {MOST_LABELS}")
    for pair in submission.labels.items():
        require(all(len(text) <= MOST_LABEL for text in pair), "labels", f"have more than {MOST_LABEL} characters")
    require_seconds("deadline", submission.seconds)
    if isinstance(submission.arguments, Verb):
        submission.arguments.require_valid()


def new_id(now: float, last: str) -> str:
    """Return an id for an operation of the time `now`, seconds since 1970, that sorts after the id `last`.

    Ids sort by time, and rise also where the clock is set back.
    """
    milliseconds = round(now * 1000)
    if last:
        milliseconds = max(milliseconds, int(last[:MILLISECONDS], 16) + 1)
    return f"{milliseconds:0{MILLISECONDS}x}{os.urandom(RANDOM_BYTES).hex()}"
