"""A checkpoint or a restore under way: which step runs, how far it is, what each one cost.

The record is what a progress bar, the manifest and the log are fed from; it changes on the event loop only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Step:
    """One finished or running step. `seconds` is 0 until it has ended; bytes are 0 where it moves none.

    `spared` of the bytes needed no copy: they were there already, or are zeros.
    """

    name: str
    seconds: float = 0
    bytes: int = 0
    spared: int = 0


@dataclass
class Operation:
    """One run of a verb ("checkpoint", "restore", "suspend", "resume") on one container."""

    verb: str
    began: float = field(default_factory=time.monotonic)
    steps: list[Step] = field(default_factory=list)
    step_name: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    frozen_ms: int = 0
    fields: dict[str, object] = field(default_factory=dict)  # what else its line of the log has
    measure: Callable[[], int] | None = None  # bytes done in this step, where somebody has to look

    @property
    def done(self) -> int:
        """Bytes done in the running step, never more than there are."""
        done = self.measure() if self.measure is not None else self.done_bytes
        return min(done, self.total_bytes) if self.total_bytes else done

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

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

    def summary(self) -> dict[str, float]:
        """Return the seconds of each step, for the log and the manifest."""
        return {step.name: round(step.seconds, 4) for step in self.steps}
