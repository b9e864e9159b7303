"""The work of a container's running operation: a separate task, which a kill or a cancel ends, once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.errors import Aborted, Cancelled
from kybernate_shim.task.codes import KINDS

if TYPE_CHECKING:
    from kybernate_shim.task.container import Container

T = TypeVar("T")

UNDONE = {
    "checkpoint": "there is no image, and the container is as before",
    "restore": "nothing is left of it",
    "suspend": "its processes keep running",
    "park": "it stays suspended, its VRAM in host memory",
    "resume": "it stays suspended",
}


class OperationWork:
    """Does the part of an operation on one container that can be stopped."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._task: asyncio.Task[Any] | None = None

    def stop(self, operation: Operation) -> bool:
        """Cancel the work, only once: nothing may disturb its undo. Return whether it was cancelled."""
        task = self._task
        if task is None or task.done() or task.cancelling():
            return False
        operation.stop_clock()
        return task.cancel()

    async def run(self, operation: Operation, work: Coroutine[Any, Any, T]) -> T:
        """Do the work of an operation. Raises Aborted or Cancelled where it was stopped."""
        task = self._task = asyncio.ensure_future(self._with_reason(operation, work))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled() and (why := self._why_stopped(operation)) is not None:
                raise why from error  # before its first step
            task.cancel()
            await asyncio.wait({task})
            raise
        finally:
            self._task = None

    async def run_until(
        self, operation: Operation, work: Coroutine[Any, Any, T], begun: asyncio.Future[T]
    ) -> tuple[T, asyncio.Task[T]]:
        """Do as `run` until `begun` has its result; the work then continues in the task that is also returned."""
        task = self._task = asyncio.ensure_future(self._with_reason(operation, work))
        try:
            await asyncio.wait({task, begun}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})
            raise
        finally:
            self._task = None
        if begun.done():
            return begun.result(), task
        if task.cancelled() and (why := self._why_stopped(operation)) is not None:
            raise why  # before its first step
        return task.result(), task

    async def _with_reason(self, operation: Operation, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except asyncio.CancelledError as error:
            if (why := self._why_stopped(operation)) is None:
                raise
            if isinstance(error.__context__, KINDS):
                why.add_note(f"it was failing already: {error.__context__}")
            raise why from error

    def _why_stopped(self, operation: Operation) -> Exception | None:
        title = f"{operation.verb} of container {self._container.id}"
        if operation.killed.is_set():
            return Aborted(f"{title} ended: it was killed")
        if operation.cancelled_by:
            cgroup = self._container.cgroup
            alive = operation.verb == "restore" or (cgroup is not None and cgroup.processes())
            state = UNDONE[operation.verb] if alive else "the container has ended"
            return Cancelled(f"{title} was cancelled by {operation.cancelled_by}; {state}")
        return None
