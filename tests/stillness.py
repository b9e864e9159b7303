"""Whether processes are frozen, as the scheduler reports: on a busy machine a look at their output alone misleads."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil

WINDOW = 0.2  # s; many times what a test's program sleeps between two steps


def come_to_rest(pids: Iterable[int], *, seconds: float = 20.0) -> None:
    """Wait until the main threads of `pids` neither run nor wait for a CPU and none has been woken for WINDOW.

    AssertionError after `seconds`: at least one of them continues.
    """
    until = time.monotonic() + seconds
    before = _switches(pids)
    while True:
        time.sleep(WINDOW)
        now = _switches(pids)
        if now == before and None not in now.values():
            return
        assert time.monotonic() < until, f"these go on, by process and its switches: {now}, {WINDOW} s earlier {before}"
        before = now


def _switches(pids: Iterable[int]) -> dict[int, tuple[int, int] | None]:
    """Return how often each main thread has given up its CPU; None for one that runs or would like to."""
    found: dict[int, tuple[int, int] | None] = {}
    for process in map(psutil.Process, pids):
        with process.oneshot():
            runs = process.status() == psutil.STATUS_RUNNING
            found[process.pid] = None if runs else tuple(process.num_ctx_switches())
    return found
