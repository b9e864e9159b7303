"""A part of the agent, and how all parts are started, watched, drained and stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from kybernate.agent.settings import Settings
from kybernate.node.failure import Failure
from kybernate_shim.undo import in_words

T = TypeVar("T")
Work = Coroutine[Any, Any, None]


class Part:
    """One part of the agent. What `start` opens goes onto `closing`, which `stop` closes.

    Parts are started in one order and stopped in the reverse one, so a part may use those before it from its `start` to
    its `stop`. A part that is not configured starts nothing.
    """

    def __init__(self) -> None:
        self.closing = AsyncExitStack()

    async def start(self) -> None:
        """Make the part ready for those that follow. A Failure ends the agent."""

    def work(self) -> Iterable[Work]:
        """Return what runs after `start` until `stop`. Work that ends by an error ends the agent."""
        return ()

    async def reload(self, before: Settings) -> None:
        """Apply settings that have changed, where the part keeps a copy of them. Raises no Failure."""

    async def drain(self, seconds: float) -> None:
        """Take on nothing new, and wait at most `seconds` for what runs."""

    async def stop(self) -> None:
        """Release everything. The part's work has ended before; `start` may have failed."""
        await self.closing.aclose()


class Parts:
    """Starts and stops parts; `log` gets the error of one whose work fails."""

    def __init__(self, parts: Sequence[Part], log: Any) -> None:
        self._parts, self._log = parts, log
        self._begun: list[Part] = []
        self._started: list[Part] = []
        self._tasks: dict[Part | None, list[asyncio.Task[None]]] = {}
        self._failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Start all parts and their work. Raises what a part's start raises, and Failure."""
        await self._unless_failed(self._start())

    async def until(self, stopping: asyncio.Event) -> None:
        """Return when it is time to stop. Raises Failure when the work of a part ends by an error before."""
        await self._unless_failed(stopping.wait())

    def spawn(self, work: Work, part: Part | None = None) -> None:
        """Do the work until its part stops; without a part, until all have stopped."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        self._tasks.setdefault(part, []).append(task)

    async def reload(self, before: Settings) -> None:
        for part in self._started:
            await part.reload(before)

    async def drain(self, seconds: float) -> None:
        for part in reversed(self._started):
            await part.drain(seconds)

    async def stop(self) -> None:
        """Stop what was started, in the reverse order."""
        for part in reversed(self._begun):
            await self._cancel(part)
            await part.stop()
        await self._cancel(None)

    async def _start(self) -> None:
        for part in self._parts:
            self._begun.append(part)
            await part.start()
            self._started.append(part)
            for work in part.work():
                self.spawn(work, part)

    async def _cancel(self, part: Part | None) -> None:
        tasks = self._tasks.pop(part, [])
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._failed.done():
            self._log.error("agent.failed", error=repr(error), exc_info=error)
            self._failed.set_result(error)

    async def _unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(work)
        waiting: set[asyncio.Future[Any]] = {task, self._failed}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                error = self._failed.result()
                raise Failure(
                    f"a part of the agent has failed: {in_words(error)}",
                    advice="the agent's log has the traceback as `agent.failed`; operations of shims continue",
                ) from error
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
