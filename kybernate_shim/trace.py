"""Where the time of a call goes: with KYBERNATE_TRACE in containerd's environment, a log line per call, with steps.

traced("Create", log)        around a call: logs it in the end
step("mounted")              inside: what has been done since the last step, or since the beginning
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from kybernate_shim.logs import Log

VARIABLE = "KYBERNATE_TRACE"


class Steps:
    """Milliseconds by step, since `begin` in seconds of the monotonic clock."""

    def __init__(self, begin: float | None = None) -> None:
        self._begin = self._last = time.monotonic() if begin is None else begin
        self.ms: dict[str, float] = {}

    def add(self, name: str) -> None:
        """End a step; one that comes again adds to itself."""
        now = time.monotonic()
        self.ms[name] = round(self.ms.get(name, 0) + (now - self._last) * 1000, 2)
        self._last = now

    def log(self, call: str, log: Log) -> None:
        log.info("call.traced", call=call, total_ms=round((self._last - self._begin) * 1000, 2), step_ms=self.ms)


_current: ContextVar[Steps | None] = ContextVar("steps", default=None)


def step(name: str) -> None:
    """Note that `name` has been done, if this call is traced."""
    if steps := _current.get():
        steps.add(name)


@contextmanager
def traced(call: str, log: Log) -> Iterator[None]:
    """Log the steps of what happens inside, if the environment asks for it."""
    if not os.environ.get(VARIABLE):
        yield
        return
    steps = begin()
    try:
        yield
    finally:
        steps.add("rest")
        steps.log(call, log)


def begin(at: float | None = None) -> Steps:
    """Trace from now on, or from `at` on the monotonic clock; the caller that begins a trace logs it."""
    steps = Steps(at)
    _current.set(steps)
    return steps
