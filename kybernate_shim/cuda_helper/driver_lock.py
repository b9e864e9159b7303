"""The driver's lock on a process, taken and given back around a move."""

from __future__ import annotations

from typing import Protocol, TypeVar

from kybernate_shim.cuda_helper.moved import NotMoved
from kybernate_shim.worker_protocol.cuda_jobs import DriverAnswer, DriverState, Lock, ReadState, Unlock
from kybernate_shim.worker_protocol.messages import Job

RELOCK_SECONDS = 2.0  # of a process whose threads are stopped: it has no work left
CALL_SECONDS = 10.0
NOT_RUNNING = "CUDA_ERROR_ILLEGAL_STATE"  # the driver's answer to a lock of what is locked, or checkpointed
NOT_READY = "CUDA_ERROR_NOT_READY"  # its answer where it could not lock a process in time

A = TypeVar("A", bound=DriverAnswer)


class DriverVerb(Protocol):
    """Calls a verb of the driver on one process, for at most so many seconds; raises NotMoved when it is refused."""

    async def __call__(self, job: Job[A], pid: int, seconds: float) -> A: ...


class DriverLock:
    """Locks and unlocks processes by `verb`. Every method raises NotMoved."""

    def __init__(self, verb: DriverVerb) -> None:
        self.verb = verb

    async def lock(self, pid: int, seconds: float) -> None:
        await self.verb(Lock(pid, milliseconds(seconds)), pid, seconds)

    async def relock(self, pid: int, seconds: float = RELOCK_SECONDS) -> None:
        """Lock a stopped process, even if a call that was given up has locked it already.

        What the driver could not do in time is not tried again: as long as the threads are stopped, nothing changes.
        """
        try:
            await self.lock(pid, seconds)
        except NotMoved as first:
            if first.name == NOT_RUNNING:
                return
            if first.name == NOT_READY:
                raise
            try:
                await self.lock(pid, seconds)
            except NotMoved as second:
                if second.name != NOT_RUNNING:
                    raise first from None

    async def unlock(self, pid: int) -> None:
        await self.verb(Unlock(pid), pid, CALL_SECONDS)

    async def is_running(self, pid: int) -> bool:
        """Return whether a process is not locked. The driver does not answer while a call hangs in the process."""
        return (await self.verb(ReadState(pid), pid, CALL_SECONDS)).state == DriverState.RUNNING


def milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
