"""Operations in words, for events, logs and notes."""

from __future__ import annotations

from kybernate.verbs.model import Operation


def title(operation: Operation) -> str:
    """Return what an operation is called, for example "suspend of web (01J…)"."""
    target = operation.target
    return f"{operation.verb} of {target.title or target.image or target.archive} ({operation.id})"


def is_noted(operation: Operation, words: str) -> bool:
    """Return whether what was found of an operation has been noted already."""
    return bool(operation.notes) and operation.notes[-1].endswith(words)


def ordinal(number: int) -> str:
    """Return a number above 1 as in "for the second time"."""
    return {2: "second", 3: "third"}.get(number, f"{number}th")
