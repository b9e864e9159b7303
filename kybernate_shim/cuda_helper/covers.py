"""What keeps a program alive that polls its GPU while the driver checkpoints it: see `linux.ptrace.covers`.

A holder (see `cuda_holder.uncovered`) stops its threads before the driver is called, and covers what that has taken
away. It outlives this helper: the next one finds it, and has it do so when the driver is done.

A call that was given up may still be carried out by the driver. The threads stay stopped until it reports the state of
the process, which it does only when it is done. The next call that changes the process waits for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from typing import Any

from kybernate_shim.cuda_helper.holders import Holders, Uncovered
from kybernate_shim.linux.process import has_ended
from kybernate_shim.linux.ptrace.tracee import InjectionFailed

NEEDED = "the driver waits for a lock of theirs"


async def _nothing() -> None:
    """Wait for nothing."""


class Covers:
    """The processes that the driver checkpoints for one helper, or for one before it.

    `settle` returns when the driver reports the state of a process, or has not done so for long.
    """

    def __init__(self, holders: Holders, settle: Callable[[int], Awaitable[object]], log: Any) -> None:
        self._holders = holders
        self._settle = settle
        self._log = log
        self._ending: set[asyncio.Task[None]] = set()
        self._later: dict[int, asyncio.Task[None]] = {}  # by pid, what is covered when the driver is done with it

    @property
    def busy(self) -> bool:
        return bool(self._ending or self._later)

    @asynccontextmanager
    async def checkpointing(self, pids: Collection[int], *, by_caller: bool) -> AsyncIterator[set[int]]:
        """Stop the threads of processes while the driver checkpoints them; put into the set those that it is done with.

        A failure is logged. `by_caller`: their threads are stopped by the caller, which covers them.
        """
        done = set[int]()
        uncovered = await self._stopped(pids, by_caller)
        try:
            yield done
        finally:  # to its end, also when the client is gone: no other call would resume the threads
            if uncovered is not None:
                self._ending.add(ending := asyncio.create_task(self._end(uncovered, done)))
                ending.add_done_callback(self._ending.discard)
                await asyncio.shield(ending)

    def take_over(self, found: Iterable[Uncovered], gone: Callable[[], Awaitable[object]]) -> None:
        """Begin to cover what a helper before this one has left uncovered, when its workers have `gone`."""
        for uncovered in found:
            self._log.warning("cuda.taken_over", pids=sorted(uncovered.pids))
            self._cover_later(uncovered, gone)

    async def over(self, pids: Iterable[int]) -> None:
        """Wait until the driver is done with these processes."""
        if self._ending:
            await asyncio.wait(self._ending)
        if left := self._later.keys() & set(pids):
            await asyncio.wait([self._later[pid] for pid in left])

    async def _stopped(self, pids: Collection[int], by_caller: bool) -> Uncovered | None:
        try:
            uncovered = await self._holders.stop_until_covered(pids, by_caller=by_caller)
        except InjectionFailed as error:
            self._failed("cuda.threads_not_stopped", [(pid, str(error)) for pid in pids])
            return None
        self._failed("cuda.threads_not_stopped", uncovered.failures)
        return uncovered

    async def _end(self, uncovered: Uncovered, done: Collection[int]) -> None:
        await self._cover(uncovered, uncovered.pids & set(done))
        if uncovered.pids:
            self._cover_later(uncovered)

    def _cover_later(self, uncovered: Uncovered, gone: Callable[[], Awaitable[object]] = _nothing) -> None:
        turn = asyncio.Lock()  # a holder is asked one thing after the other

        async def cover(pid: int) -> None:
            try:
                await gone()
                await self._settle(pid)
                async with turn:
                    await self._cover(uncovered, uncovered.pids & {pid})
            finally:
                del self._later[pid]

        for pid in uncovered.pids:
            self._later[pid] = asyncio.create_task(cover(pid))

    async def _cover(self, uncovered: Uncovered, pids: Collection[int]) -> None:
        if not pids:
            return
        left = uncovered.pids
        try:
            covered = await uncovered.cover(pids)
        except InjectionFailed as error:
            self._failed("cuda.not_covered", [(pid, str(error)) for pid in left])
            return
        self._failed("cuda.not_covered", covered.failures)
        self._failed(
            "cuda.threads_resumed", [(pid, "the driver waits for a lock of theirs") for pid in covered.continued]
        )

    def _failed(self, event: str, failures: Iterable[tuple[int, str]]) -> None:
        for pid, error in failures:
            if not has_ended(pid):
                self._log.warning(event, pid=pid, error=error)
