"""Refuses submissions that no operation can have, before anything is looked up or written."""

from __future__ import annotations

from kybernate.verbs.model import Submission
from kybernate.verbs.verb import Verb, require, require_seconds

MOST_KEY = 256  # characters
MOST_LABELS = 64
MOST_LABEL = 1024  # characters, of a label's name and of its value


def require_valid(submission: Submission) -> None:
    """Raise Invalid, with the field."""
    require(len(submission.key) <= MOST_KEY, "idempotency_key", f"has more than {MOST_KEY} characters")
    require(len(submission.labels) <= MOST_LABELS, "labels", f"are more than {MOST_LABELS}")
    for pair in submission.labels.items():
        require(all(len(text) <= MOST_LABEL for text in pair), "labels", f"have more than {MOST_LABEL} characters")
    require_seconds("deadline", submission.seconds)
    if isinstance(submission.arguments, Verb):
        submission.arguments.require_valid()
