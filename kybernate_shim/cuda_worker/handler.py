"""Which function does a job of a CUDA worker, and how long it took."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

from kybernate_shim.cuda_worker import driver
from kybernate_shim.linux.kernel_text import plain
from kybernate_shim.worker_protocol.cuda_jobs import (
    Checkpoint,
    CudaJob,
    Describe,
    DriverAnswer,
    DriverInfo,
    Lock,
    MoveJob,
    Ping,
    ReadState,
    Ready,
    Restore,
    StateAnswer,
    Unlock,
)
from kybernate_shim.worker_protocol.errors import MessageInvalid
from kybernate_shim.worker_protocol.messages import JobDone, changed
from kybernate_shim.worker_protocol.server import JobCall

if TYPE_CHECKING:
    from kybernate_shim.cuda_worker.arena_executor import ArenaExecutor  # only one worker of a node needs it

NOT_FOUND = 500  # the driver lacks a call
MOST_SECONDS: Final = 60.0  # for the driver

A = TypeVar("A", bound=DriverAnswer)
T = TypeVar("T")


class RunningCalls:
    """The driver's checkpoints that run in a worker, which lives until they have ended, also without its helper.

    A holder keeps the threads of these processes stopped meanwhile, and the next helper waits for the worker's end
    before it has them covered.
    """

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


class CudaJobHandler:
    """Does the jobs; those of the arena only where it has one."""

    def __init__(self, arena: ArenaExecutor | None) -> None:
        self.checkpoints = RunningCalls()
        self._arena = arena

    def handle(self, job: CudaJob, call: JobCall) -> JobDone:
        match job:
            case Ready() | Ping():
                return job.done_by(_nothing)
            case Describe():
                return job.done_by(_describe)
            case ReadState():
                return job.done_by(lambda job: _called(StateAnswer, driver.state, job))
            case Lock():
                return job.done_by(lambda job: _called(DriverAnswer, driver.lock, job))
            case Checkpoint():
                return job.done_by(self._checkpoint)
            case Restore():
                return job.done_by(lambda job: _called(DriverAnswer, driver.restore, job))
            case Unlock():
                return job.done_by(lambda job: _called(DriverAnswer, driver.unlock, job))
            case _:
                return self._move(job, call)

    def _checkpoint(self, job: Checkpoint) -> DriverAnswer:
        with self.checkpoints.running():
            return _called(DriverAnswer, driver.checkpoint, job)

    def _move(self, job: MoveJob, call: JobCall) -> JobDone:
        if self._arena is None:
            raise MessageInvalid(f"{job.verb} is a job for the arena's worker, and this one has none")
        return self._arena.do(job, call)


def _nothing(job: Ready | Ping) -> None:
    """Return: the answer alone is what the request is for."""


def _describe(job: Describe) -> DriverInfo:
    return driver.info()


def _called(kind: type[A], call: Callable[[T], A], job: T) -> A:
    """Call the driver and measure that. What the bindings raise for a missing call is an answer, too."""
    began = time.monotonic()
    try:
        answer = call(job)
    except Exception as error:  # noqa: BLE001  # they have no type of error for that
        answer = kind(NOT_FOUND, "CUDA_ERROR_NOT_FOUND", plain(str(error)))
    return changed(answer, seconds=time.monotonic() - began)
