"""The time that one job of the arena's worker has, which its process cannot extend."""

from __future__ import annotations

import time

from kybernate_shim.arena.control import ControlUnusable

ANSWER_SECONDS = 20.0  # that a process has for one answer
UNDO_SECONDS = 2.0  # for a job whose time is over, to leave its process in order


class JobDeadline:
    """The deadline of a job, `seconds` from now on. Every wait for the job's process gets its limit here."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = time.monotonic() + seconds

    def check(self) -> None:
        """Raise ControlUnusable when the time is over. To be called between two slices of long work."""
        self.left()

    def left(self) -> float:
        """Return for how many seconds to wait for an answer. Raises ControlUnusable."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise ControlUnusable(f"the arena abandoned the process after {self._seconds:g} s")
        return min(left, ANSWER_SECONDS)

    def undo_left(self) -> float:
        """Return the same for an answer to an undo of the job, which may be requested when the time is over."""
        left = self._until + UNDO_SECONDS - time.monotonic()
        return min(max(left, 0.0), ANSWER_SECONDS)
