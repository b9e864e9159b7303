"""The driver's checkpoints that run in a worker. It lives until they have ended, also when the helper has been killed.

A holder keeps the threads of these processes stopped meanwhile, and the next helper waits for the worker's end before
it has them covered.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

MOST_SECONDS: Final = 60.0  # for the driver


class RunningCalls:
    """How many calls are in the driver."""

    def __init__(self) -> None:
        self._number = 0
        self._changed = threading.Condition()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Enclose a call."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def end(self) -> None:
        """Return when all have ended, or take too long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._number, MOST_SECONDS)

    def _count(self, change: int) -> None:
        with self._changed:
            self._number += change
            self._changed.notify_all()
