"""Copies of memory that a process has released already: they continue while the driver checkpoints the process.

A holder keeps descriptors of such memory until the arena has it. If the worker that copies it dies, another one
finishes the copies; if the helper dies, the next helper finds the holder, and has them finished. Until then the process
cannot be settled, and calls about it wait here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from kybernate_shim.arena.refusals import ArenaRefusal
from kybernate_shim.cuda_helper.holders import Custody, Holders
from kybernate_shim.cuda_helper.moved import NotMoved, each_once
from kybernate_shim.cuda_helper.node_arena import NodeArena
from kybernate_shim.linux.process import has_ended
from kybernate_shim.linux.ptrace.tracee import InjectionFailed
from kybernate_shim.worker_protocol.cuda_jobs import COPY_EVENTS, Copied, Copy, Finish, MoveAnswer
from kybernate_shim.worker_protocol.errors import WorkerError
from kybernate_shim.worker_protocol.messages import Encoded

ATTEMPTS = 2  # to finish the copies of a worker that has died


class _Heard:
    """What the worker reports on a copy: `released`, and what need not be kept any more."""

    def __init__(self, custody: Custody | None) -> None:
        self.released = asyncio.Event()
        self._custody = custody
        self._giving_up: set[asyncio.Task[None]] = set()

    def __call__(self, message: Encoded) -> None:
        event = COPY_EVENTS.decoded(message)
        if not isinstance(event, Copied):
            self.released.set()
        elif self._custody is not None:
            self._giving_up.add(task := asyncio.create_task(self._custody.give_up(event.blocks)))
            task.add_done_callback(self._giving_up.discard)

    async def given_up(self) -> None:
        await asyncio.gather(*self._giving_up)


@dataclass
class _Begun:
    """A copy that runs, or one that has failed. `custody` is None where the process releases what is copied."""

    custody: Custody | None
    task: asyncio.Task[MoveAnswer]
    heard: _Heard | None = None


class Copies:
    """The copies of one helper, one at a time for a process."""

    def __init__(self, arena: NodeArena, holders: Holders, log: Any) -> None:
        self._arena = arena
        self._holders = holders
        self._log = log
        self._begun: dict[int, _Begun] = {}

    async def begin(self, pid: int, seconds: float, ready: MoveAnswer) -> MoveAnswer:
        """Copy what the worker has made `ready`; return when the process has released it, or why it has not.

        Raises WorkerError. `ended` has to be awaited in any case.
        """
        custody = await self._kept(pid, ready)
        heard = _Heard(custody)
        copying = self._arena.do(Copy(pid, seconds, custody is not None), heard)
        begun = self._begun[pid] = _Begun(custody, asyncio.create_task(copying), heard)
        released = asyncio.create_task(heard.released.wait())
        await asyncio.wait({begun.task, released}, return_when=asyncio.FIRST_COMPLETED)
        released.cancel()
        if begun.task.done():
            return begun.task.result()
        return ready

    def take_over(self, custody: Custody, gone: Callable[[], Awaitable[object]], seconds: float) -> None:
        """Finish what the worker of an earlier helper has begun, when that has `gone`."""

        async def finish() -> MoveAnswer:
            await gone()
            return await self._finish(custody, seconds)

        self._log.warning("arena.taken_over", pid=custody.pid)
        self._begun[custody.pid] = _Begun(custody, asyncio.create_task(finish()))

    async def waited_for(self, pid: int) -> None:
        """Return when no copy of the process runs. What has failed is left to `ended`."""
        if (begun := self._begun.get(pid)) is not None:
            await _failure_of(begun.task)

    async def ended(self, pid: int, seconds: float) -> None:
        """Return when nothing is left to be copied. Raises NotMoved: the process must stay locked."""
        begun = self._begun.get(pid)
        if begun is None:
            return
        failure = await _failure_of(begun.task)
        reasons = [failure]
        for _ in range(ATTEMPTS):
            if not failure or has_ended(pid) or begun.custody is None:
                break
            if len(reasons) > 1 and not self._arena.worker.busy:
                await self._arena.worker.close()  # it may be at fault
            begun.task = asyncio.create_task(self._finish(begun.custody, seconds))
            failure = await _failure_of(begun.task)
            reasons.append(failure)
        if failure and begun.custody is not None and not has_ended(pid):
            why = each_once(filter(None, reasons))
            raise NotMoved(f"process {pid} stays locked, and its memory on the GPU: {why}", away=True)
        if begun.heard is not None:
            await begun.heard.given_up()
        if begun.custody is not None:
            await begun.custody.end()
        self._begun.pop(pid, None)

    async def tidy(self) -> None:
        """Give up what is kept of processes that have ended: no call about them may come."""
        for pid in [pid for pid, begun in self._begun.items() if begun.task.done() and has_ended(pid)]:
            await self.ended(pid, 0.0)

    async def close(self) -> None:
        """Wait for copies that run."""
        for begun in self._begun.values():
            await _failure_of(begun.task)

    async def _kept(self, pid: int, ready: MoveAnswer) -> Custody | None:
        if not ready.descriptors:
            return None
        try:
            return await self._holders.keep(pid, ready.worker, ready.descriptors)
        except InjectionFailed as error:
            self._log.warning("arena.not_kept", pid=pid, error=str(error))
            return None

    async def _finish(self, custody: Custody, seconds: float) -> MoveAnswer:
        keeping = custody.keeping
        return await self._arena.do(Finish(custody.pid, seconds, keeping.keeper, keeping.descriptors))


async def _failure_of(task: asyncio.Task[MoveAnswer]) -> str:
    """Wait for a copy, and return why it has failed, "" where it has not. It continues if this is cancelled."""
    await asyncio.wait({task})
    try:
        answer = task.result()
    except WorkerError as error:
        return str(error) or repr(error)
    return (answer.text or ArenaRefusal(answer.refusal)) if answer.refusal else ""
