"""Checkpoints that the driver still makes when the helper has been killed, which had stopped the program's threads.

The kernel resumes them then, and the driver is about to take mappings away that they read, or has just done so (see
`linux.ptrace.covers`). So the worker, which lives until its own calls have ended, stops them again, and covers what was
taken away. A call is forgotten when the helper says that it has done that itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from kybernate_shim.arena.control import must_run
from kybernate_shim.linux.process import has_ended
from kybernate_shim.linux.ptrace.covers import Span, cover, shared_mappings
from kybernate_shim.linux.ptrace.seized import SeizedProcess
from kybernate_shim.linux.ptrace.tracee import InjectionFailed

STOP_SECONDS: Final = 2.0
STOPPED_SECONDS: Final = 1.0  # at a time: a stopped thread may have a lock that the driver waits for
PAUSE: Final = 0.002  # between two attempts, and in which a thread leaves the heap
MOST_SECONDS: Final = 60.0  # for the driver


@dataclass
class _Running:
    """A checkpoint of process `pid`, and what it could read before."""

    pid: int
    before: list[Span]
    ended: threading.Event = field(default_factory=threading.Event)


class OrphanedCalls:
    """The checkpoints that run in this worker, or have ended and are not known to be covered."""

    def __init__(self) -> None:
        self._calls: dict[int, _Running] = {}

    @contextmanager
    def running(self, pid: int) -> Iterator[None]:
        """Enclose the driver's checkpoint of a process; `forget` it some time after that."""
        try:
            call = self._calls[pid] = _Running(pid, shared_mappings(pid))
        except OSError:
            yield  # it has ended, as the driver will say
            return
        try:
            yield
        finally:
            call.ended.set()

    def forget(self, pid: int) -> None:
        self._calls.pop(pid, None)

    def end(self) -> None:
        """Return when all have ended and are covered, or take too long; to be called when the helper is gone."""
        threads = [threading.Thread(target=_end, args=(call,)) for call in list(self._calls.values())]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _end(call: _Running) -> None:
    until = time.monotonic() + MOST_SECONDS
    while time.monotonic() < until and not has_ended(call.pid):
        try:
            with SeizedProcess(call.pid, spare=must_run, seconds=STOP_SECONDS) as held:
                if call.ended.wait(STOPPED_SECONDS):
                    cover(held, call.before)
                    return
        except (InjectionFailed, OSError):
            pass  # the kernel closes the helper's end before it resumes what that had stopped
        time.sleep(PAUSE)
