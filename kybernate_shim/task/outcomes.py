"""How operations on a container have ended, and which of them a cancel is about; decisions without I/O.

A client that loses its connection, or is started again, finds here what became of an operation of its own.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kybernate_shim.errors import Invalid, Missing, Refused
from kybernate_shim.steps import Step

KEPT: Final = 8  # ended operations; a client that looks later asks containerd for the state
MOST_ERROR: Final = 2048  # characters of a cause in an event
ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")

Ending = Literal["succeeded", "failed", "cancelled"]


class NothingToCancel(Refused):
    """No operation runs on the container, or the named one has ended by itself."""


@dataclass(frozen=True)
class Outcome:
    """An operation that has ended. `code` is the name of the error's RPC code; it, `error` and `state` may be empty.

    `state` says in words what was true of the container then. `at` is in seconds of the monotonic clock.
    """

    id: str
    verb: str
    ending: Ending
    at: float
    seconds: float
    code: str = ""
    error: str = ""
    state: str = ""
    steps: tuple[Step, ...] = ()
    image_bytes: int = 0
    frozen_ms: int = 0
    vram_bytes: int = 0
    source: str = ""  # tier or store of a restore's image
    path: str = ""
    manifest_digest: str = ""

    @property
    def labels(self) -> dict[str, str]:
        """Return an event's labels for it: its cause, what it moved, and how long it took, as far as known."""
        figures = {"bytes": self.image_bytes, "frozen_ms": self.frozen_ms, "vram_bytes": self.vram_bytes}
        known = {name: str(figure) for name, figure in figures.items() if figure}
        cause = {"error": self.error[:MOST_ERROR]} if self.error else {}
        return {"seconds": f"{self.seconds:.3f}", **known, **cause}


def operation_id(text: str) -> str:
    """Return a client's name for an operation, which may be empty. Raises Invalid."""
    if text and not ID.fullmatch(text):
        raise Invalid(f"operation: expected at most 64 of A-Z, a-z, 0-9, '.', '_' and '-', found {text[:80]!r}")
    return text


class Ledger:
    """The outcomes of a container's last operations, newest first."""

    def __init__(self) -> None:
        self._outcomes: deque[Outcome] = deque(maxlen=KEPT)

    def add(self, outcome: Outcome) -> None:
        self._outcomes.appendleft(outcome)

    def find(self, id: str) -> Outcome | None:
        """Return the last outcome of the operation of that name, which is not empty."""
        return next((outcome for outcome in self._outcomes if outcome.id == id), None) if id else None

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        return tuple(self._outcomes)


def to_cancel(asked: str, running: Sequence[str], ledger: Ledger, container: str) -> int | Outcome:
    """Return which of the names in `running` a cancel of `asked` is about, or how that operation was cancelled before.

    `asked` may be empty, for whatever runs: the first. Raises Missing and NothingToCancel.
    """
    if running and asked in ("", *running):
        return running.index(asked) if asked else 0
    if not asked:
        raise NothingToCancel(f"no operation runs on container {container}: there is nothing to cancel")
    ended = ledger.find(asked)
    if ended is None:
        raise Missing(f"operation {asked} on container {container}: it neither runs nor has ended recently")
    if ended.ending == "cancelled":
        return ended
    raise NothingToCancel(f"operation {asked}, a {ended.verb} of container {container}, has {ended.ending} already")
