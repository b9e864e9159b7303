"""A checkpoint or a restore that runs: which step runs, how far it is, what each one cost.

The record is what a progress bar, the manifest and the log are fed from; it changes on the event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kybernate_shim.steps import Step

Stoppable = Literal["always", "by a kill", "never"]


@dataclass
class Operation:
    """One run of a verb ("checkpoint", "restore", "suspend", "park", "resume") on one container.

    `id` is the caller's name for it, and `cancelled_by` the client that has cancelled it; both may be empty.
    """

    verb: str
    id: str = ""
    began: float = field(default_factory=time.monotonic)
    steps: list[Step] = field(default_factory=list)
    step_name: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    image_bytes: int = 0
    vram_bytes: int = 0
    frozen_ms: int = 0
    stoppable: Stoppable = "always"
    cancelled_by: str = ""
    source: str = ""  # tier or store that a restore's image comes from
    killed: asyncio.Event = field(default_factory=asyncio.Event)  # the container is to end, and its operation with it
    fields: dict[str, object] = field(default_factory=dict)  # what else its line of the log has
    measure: Callable[[], int] | None = None  # bytes done in this step, where they have to be looked up
    _limit: asyncio.Timeout | None = None

    @property
    def done(self) -> int:
        """Bytes done in the running step, never more than there are."""
        done = self.measure() if self.measure is not None else self.done_bytes
        return min(done, self.total_bytes) if self.total_bytes else done

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def comes_from(self, source: str) -> None:
        """Note where a restore's image comes from, also for the log."""
        self.source = source
        self.fields["source"] = source

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[asyncio.Timeout]:
        """Enclose all steps, which may take `seconds` together, 0 for any time. Raises TimeoutError."""
        async with asyncio.timeout(seconds or None) as limit:
            self._limit = limit
            try:
                yield limit
            finally:
                self._limit = None

    def stop_clock(self) -> None:
        """Let the steps that follow take any time: an undo, or what must not be cut short."""
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(None)

    async def unhurried(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work that only a kill may break off: a cancel or a deadline takes effect when it has ended."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            killed = asyncio.ensure_future(self.killed.wait())
            await asyncio.wait({task, killed}, return_when=asyncio.FIRST_COMPLETED)
            for one in (task, killed):
                one.cancel()
            await asyncio.wait({task, killed})
            if not task.cancelled() and (failure := task.exception()) is not None:
                error.add_note(f"and a step failed: {failure}")
            raise

    def commit(self) -> None:
        """Pass the point of no return: neither a cancel, a kill nor the deadline stops the operation from here on."""
        self.stoppable = "never"
        self.stop_clock()

    @contextmanager
    def step(self, name: str, *, total_bytes: int = 0) -> Iterator[Step]:
        """Time a step; its entry is kept also when it fails, because the log wants to know where time went."""
        step = Step(name)
        begin = time.monotonic()
        self.steps.append(step)
        self.step_name, self.done_bytes, self.total_bytes = name, 0, total_bytes
        try:
            yield step
        finally:
            step.seconds = time.monotonic() - begin
            step.bytes = step.bytes or self.done_bytes
            self.step_name = ""

    @contextmanager
    def waiting(self, step: Step, total_bytes: int, measure: Callable[[], int]) -> Iterator[None]:
        """Time and show a wait within another step, whose seconds do not include it."""
        outer, begin = self.step_name, time.monotonic()
        self.steps.append(step)
        self.step_name, self.total_bytes, self.measure = step.name, total_bytes, measure
        try:
            yield
        finally:
            step.seconds, step.bytes = time.monotonic() - begin, measure()
            self.step_name, self.total_bytes, self.measure = outer, 0, None

    @contextmanager
    def showing(self, name: str) -> Iterator[None]:
        """Show a step in the progress, whose times are added when they are known."""
        self.step_name = name
        try:
            yield
        finally:
            self.step_name = ""

    def add_steps(self, steps: Iterable[Step], moving: str, moved: int) -> None:
        """Add steps that were timed elsewhere. `moved` bytes are those of the step `moving`, if it has none."""
        steps = list(steps)
        moved -= sum(step.bytes for step in steps)  # the arena's share is in its own step
        self.steps += [
            replace(step, bytes=max(0, moved)) if step.name == moving and not step.bytes else step for step in steps
        ]

    def summary(self) -> dict[str, float]:
        """Return the seconds of each step, for the log and the manifest."""
        return {step.name: round(step.seconds, 4) for step in self.steps}
