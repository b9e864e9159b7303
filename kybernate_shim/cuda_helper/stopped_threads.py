"""Program threads that are stopped while the driver is unlocked, and the processes whose threads must stay stopped.

Where memory is missing, the library keeps placeholders, on which a program would compute as on its own memory. So a
separate process (see `cuda_holder`), which outlives the helper, stops the threads until the driver has locked the
process again. One that has all of its memory back and that the driver does not lock again, because it waits for one of
the stopped threads, keeps its threads stopped in place of the lock: what unlocks it resumes them.

When a helper dies, the next helper takes over the processes that were left stopped: it completes each step that was
begun, so that every block is in one place, VRAM or the arena, locks the driver, and resumes the threads. The process is
then LOCKED: the next operation reloads what the arena has. A process that cannot be locked, because one of its threads
was stopped in a driver call, is resumed as it is when all of its memory is in VRAM.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from kybernate_shim.cuda_helper.driver_lock import DriverLock
from kybernate_shim.cuda_helper.holders import Hold, Holders
from kybernate_shim.cuda_helper.library_calls import can_work, in_one_place
from kybernate_shim.cuda_helper.moved import NotMoved
from kybernate_shim.cuda_helper.node_arena import NodeArena
from kybernate_shim.linux.process import has_ended
from kybernate_shim.linux.ptrace.tracee import InjectionFailed

STOP_SECONDS = 10.0
PAUSES = (0.001, 0.003, 0.002, 0.007, 0.004, 0.011, 0.005, 0.013) * 2  # s between two attempts to stop, irregular
STRANDED_SECONDS = 1.0  # between two attempts to lock a process that could not be locked
TAKE_OVER_SECONDS = 15.0  # for a call about a process that a helper before has left stopped


class StoppedThreads:
    """The stopped processes of one helper.

    `stranded` are those whose threads stay stopped: their memory is in the arena, or may be, and the driver does not
    lock them, or has not been asked to yet. `held` are those with all of their memory that the driver does not lock:
    their stopped threads serve as the lock.
    """

    def __init__(self, arena: NodeArena, driver: DriverLock, holders: Holders, log: Any) -> None:
        self.stranded: set[int] = set()
        self.held: dict[int, Hold] = {}
        self._arena = arena
        self._driver = driver
        self._holders = holders
        self._log = log
        self._keeping: dict[int, asyncio.Task[None]] = {}  # by pid, what waits for its lock
        self._taking_over: dict[int, asyncio.Task[None]] = {}  # by pid, what ends the step of an earlier helper

    @asynccontextmanager
    async def stopped(self, pid: int) -> AsyncIterator[Callable[[], None]]:
        """Stop every thread but those that have to work, for the context, or until `let_go` if its value is called.

        Raises InjectionFailed with nothing stopped.
        """
        if pid in self.stranded or pid in self.held:
            raise InjectionFailed("they are stopped already, until the driver locks the process")
        hold = await self._stop(pid)
        instead_of_lock: list[int] = []
        try:
            yield partial(instead_of_lock.append, pid)
        finally:
            if instead_of_lock:
                self.held[pid] = hold
            elif pid in self.stranded:
                self._keeping[pid] = asyncio.create_task(self._keep_stopped(hold))
                self._keeping[pid].add_done_callback(lambda _: self._keeping.pop(pid, None))
            else:
                await asyncio.shield(hold.let_go())

    async def let_go(self, pid: int) -> None:
        """Let the threads of a process resume if they were stopped in place of the driver's lock."""
        if hold := self.held.pop(pid, None):
            await asyncio.shield(hold.let_go())

    async def tidy(self) -> None:
        """Forget processes that have ended while their threads were stopped in place of the driver's lock."""
        for pid in [pid for pid in self.held if has_ended(pid)]:
            await self.let_go(pid)

    async def _stop(self, pid: int) -> Hold:
        """Stop the threads while none has a lock of the heap: else the driver could not work, nor they resume."""
        for pause in PAUSES:
            hold = await self._holders.stop(pid, STOP_SECONDS)
            free = False
            try:
                free = await can_work(pid)
            finally:
                if not free:
                    await asyncio.shield(hold.let_go())
            if free:
                return hold
            await asyncio.sleep(pause)
        raise InjectionFailed(f"one of them had a lock of the heap at each of {len(PAUSES)} attempts")

    def take_over(self, found: Iterable[Hold]) -> None:
        """Begin to end the steps of processes that a helper before this one has left stopped."""
        for hold in found:
            self._log.warning("arena.taken_over", pid=hold.pid)
            self.stranded.add(hold.pid)
            self._taking_over[hold.pid] = asyncio.create_task(self._end_step(hold))

    async def taken_over(self, pids: Iterable[int]) -> None:
        """Wait until the processes that were left stopped resume, but not for long: then they are `stranded`."""
        if tasks := [self._taking_over[pid] for pid in set(pids) & self._taking_over.keys()]:
            await asyncio.wait(tasks, timeout=TAKE_OVER_SECONDS)

    async def _end_step(self, hold: Hold) -> None:
        """End the step that an earlier helper began with a stopped process, and resume its threads."""
        with suppress(NotMoved):  # the driver returns no state while a call hangs in the process
            if await self._driver.is_running(hold.pid):
                await in_one_place(hold.pid, self._arena.memory)
        await self._keep_stopped(hold)
        del self._taking_over[hold.pid]

    async def _keep_stopped(self, hold: Hold) -> None:
        """Resume a process's threads when it is locked, has all of its memory, or has ended."""
        pid = hold.pid
        while not has_ended(pid):
            with suppress(NotMoved):
                await self._driver.relock(pid)
                break
            if await in_one_place(pid, self._arena.memory):
                break
            await asyncio.sleep(STRANDED_SECONDS)
        await hold.let_go()
        self.stranded.discard(pid)
        self._log.info("arena.stopped_threads_ended", pid=pid)
