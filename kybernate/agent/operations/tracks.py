"""How far running operations have come, for those who watch: shown a few times a second at most."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from kybernate.agent.operations.progress import Track
from kybernate.verbs.model import Operation, Report, Step

SHOW_SECONDS = 0.25  # between two messages about the progress of one operation


class Tracks:
    """The tracks of operations by id. `show` is called with an id when its progress is to be seen."""

    def __init__(self, clock: Callable[[], float], show: Callable[[str], None]) -> None:
        self._clock = clock
        self._show = show
        self._tracks: dict[str, Track] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._shown: dict[str, float] = {}

    def begin(self, id: str, now: float) -> None:
        self._tracks[id] = Track(now, now)

    def heard(self, operation: Operation, report: Report) -> None:
        """Note a report, and show it now or soon."""
        id, now = operation.id, self._clock()
        began = operation.started or now
        self._tracks[id] = self._tracks.get(id, Track(began, now)).heard(report, now)
        loop = asyncio.get_running_loop()
        due = self._shown.get(id, 0.0) + SHOW_SECONDS - loop.time()
        if due <= 0:
            self._show_now(id)
        elif id not in self._timers:
            self._timers[id] = loop.call_later(due, self._show_now, id)

    def steps(self, id: str) -> Sequence[Step]:
        """Return the steps that were reported."""
        return self._tracks[id].steps if id in self._tracks else ()

    def with_progress(self, operation: Operation) -> Operation:
        track = self._tracks.get(operation.id)
        if track is None or operation.final:
            return operation
        return replace(operation, steps=track.steps, progress=track.progress(self._clock()))

    def drop(self, id: str) -> None:
        self._tracks.pop(id, None)
        self._shown.pop(id, None)
        if timer := self._timers.pop(id, None):
            timer.cancel()

    def close(self) -> None:
        """Show nothing any more."""
        for timer in self._timers.values():
            timer.cancel()

    def _show_now(self, id: str) -> None:
        self._timers.pop(id, None)
        self._shown[id] = asyncio.get_running_loop().time()
        self._show(id)
