"""The tasks that carry operations out, look them up and roll them back, and what they have seen.

Each task ends by noting an observation and waking the engine, which alone decides what follows. The journal is not
known here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from kybernate.agent.operations.executor import Executor
from kybernate.logs import with_ids
from kybernate.node.failure import Failure
from kybernate.verbs.errors import OperationUndone, OutcomeUnknown, fault_of
from kybernate.verbs.model import Observation, Operation, Report, Seen

LOG = logging.getLogger(__name__)


class Attendance:
    """What is known of each operation that has begun: `seen` by id. `remarks` are to be noted with its next change."""

    def __init__(
        self,
        executor: Executor,
        clock: Callable[[], float],
        *,
        wake: Callable[[], None],
        heard: Callable[[str, Report], None],
    ) -> None:
        self.seen: dict[str, Observation] = {}
        self.remarks: dict[str, list[str]] = {}
        self._executor = executor
        self._clock = clock
        self._wake = wake
        self._heard = heard
        self._tasks: dict[asyncio.Task[None], str] = {}

    def attend(self, operation: Operation) -> None:
        """Carry it out, or wait for the shim that does."""
        self.seen[operation.id] = Observation(Seen.ATTENDED)
        self._begin(operation, self._attend(operation))

    def observe(self, operation: Operation) -> None:
        """Find out what became of it."""
        self.seen[operation.id] = Observation(Seen.LOOKING)
        self._begin(operation, self._observe(operation))

    def roll_back(self, operation: Operation) -> None:
        """Remove what it has left half done; it is absent then."""
        self.seen[operation.id] = Observation(Seen.LOOKING)
        self._begin(operation, self._roll_back(operation))

    def interrupt(self, operation: Operation) -> None:
        """Ask once for its end."""
        self.seen[operation.id] = replace(self.seen[operation.id], asked=True)
        self._begin(operation, self._interrupt(operation))

    def remark(self, id: str, text: str) -> None:
        self.remarks.setdefault(id, []).append(text)

    def forget(self, id: str) -> None:
        self.seen.pop(id, None)
        self.remarks.pop(id, None)

    async def settle(self, seconds: float) -> set[str]:
        """Wait so long for the tasks that run now, and return the operations of those that run then."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=seconds)
        return set(self._tasks.values())

    async def close(self) -> None:
        """End the tasks. What they wait for continues without them where a shim does it."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    def _begin(self, operation: Operation, work: Coroutine[Any, Any, None]) -> None:
        context = with_ids(operation=operation.id, verb=operation.verb)
        task = asyncio.create_task(work, name=f"{operation.verb} {operation.id}", context=context)
        self._tasks[task] = operation.id
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        self._wake()

    def _saw(self, operation: Operation, seen: Observation) -> None:
        self.seen[operation.id] = replace(seen, at=self._clock())
        self._wake()

    async def _attend(self, operation: Operation) -> None:
        try:
            result = await self._executor.execute(operation, lambda report: self._heard(operation.id, report))
        except OperationUndone as error:
            self._saw(operation, Observation(Seen.CANCELLED, str(error)))
        except Failure as error:
            self._saw(operation, Observation(Seen.FAILED, fault=fault_of(error)))
        except OutcomeUnknown as error:
            self._lost(operation, str(error))
        except Exception as error:  # whatever it is, the operation is neither lost nor counted as failed
            LOG.exception("operation %s met an unexpected error", operation.id)
            self._lost(operation, f"{type(error).__name__}: {error}")
        else:
            self._saw(operation, Observation(Seen.SUCCEEDED, result=result))

    def _lost(self, operation: Operation, why: str) -> None:
        self.remark(operation.id, f"the agent lost sight of it and looks for it: {why}")
        self._saw(operation, Observation(Seen.UNREACHABLE, why))

    async def _observe(self, operation: Operation) -> None:
        try:
            seen = await self._executor.observe(operation)
        except Exception as error:  # what cannot be looked at now is looked at later
            if not isinstance(error, Failure):
                LOG.exception("operation %s cannot be looked up", operation.id)
            seen = Observation(Seen.UNREACHABLE, str(error))
        self._saw(operation, seen)

    async def _roll_back(self, operation: Operation) -> None:
        try:
            note = await self._executor.roll_back(operation)
        except Exception as error:  # ends the operation, with what is left in the error
            if not isinstance(error, Failure):
                LOG.exception("operation %s cannot be rolled back", operation.id)
            self._saw(operation, Observation(Seen.FAILED, "it could not be rolled back", fault=fault_of(error)))
        else:
            self._saw(operation, Observation(Seen.ABSENT, note))

    async def _interrupt(self, operation: Operation) -> None:
        try:
            await self._executor.cancel(operation)
        except Exception as error:  # it then ends by itself
            if not isinstance(error, Failure):
                LOG.exception("operation %s cannot be cancelled", operation.id)
            self.remark(operation.id, f"it could not be asked to end, and continues: {error}")
