"""One number for the progress of work that several threads do."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock


class Counter:
    """Adds up what threads have done, for a record that shows one number."""

    def __init__(self, show: Callable[[int], object]) -> None:
        self._done, self._lock, self._show = 0, Lock(), show

    def __call__(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._show(self._done)
