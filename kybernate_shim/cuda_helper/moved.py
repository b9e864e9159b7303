"""What became of a step with the VRAM of one process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kybernate_shim.worker_protocol.cuda_jobs import MoveAnswer


class NotMoved(Exception):
    """A step failed; the message says which, and where the bytes are. `away` when the process must not be unlocked.

    `name` is the driver's name for the error, if a verb of it was refused.
    """

    def __init__(self, message: str, *, away: bool = False, name: str = "") -> None:
        super().__init__(message)
        self.away = away
        self.name = name


@dataclass(frozen=True)
class Moved:
    """What was moved, and the `reason` where that is nothing, or not all that the library has allocated.

    `spared` of the bytes needed no copy: the arena had them already, or they are zeros.
    """

    bytes: int = 0
    reason: str = ""
    spared: int = 0


def moved(answer: MoveAnswer) -> Moved:
    """Return what an answer of the arena's worker means."""
    if answer.refusal:
        return Moved(0, answer.text)
    left = answer.left_bytes
    reason = (
        f"{left >> 20} MiB that the program exports, binds or maps in parts are offloaded by the driver" if left else ""
    )
    return Moved(answer.bytes, reason, answer.clean_bytes + answer.zero_bytes)


def each_once(reasons: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(reasons))
