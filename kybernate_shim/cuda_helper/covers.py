"""What keeps a program alive that polls its GPU while the driver checkpoints it: see `linux.ptrace.covers`.

Its threads are stopped until memory covers what the driver has taken away. They may have a lock that the driver waits
for, such as the heap's: then they continue for a moment. A process whose threads cannot be stopped, because a debugger
has them, is checkpointed all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

from kybernate_shim.arena.control import must_run
from kybernate_shim.linux.futex import NUMBERS
from kybernate_shim.linux.own_thread import in_own_thread
from kybernate_shim.linux.process import has_ended
from kybernate_shim.linux.ptrace.covers import Span, cover, shared_mappings
from kybernate_shim.linux.ptrace.seized import SeizedProcess
from kybernate_shim.linux.ptrace.tracee import InjectionFailed

STOP_SECONDS: Final = 2.0
GRACE_SECONDS: Final = 1.0
LOOK_SECONDS: Final = 0.05  # between two looks at what the driver's threads wait for; none waits so long otherwise
BREATH_SECONDS: Final = 0.005  # in which a thread leaves the heap
BREATHS: Final = 16  # then they continue until the driver is done
FUTEX: Final = frozenset(str(number) for number in NUMBERS.values())


@asynccontextmanager
async def covering(pids: Iterable[int], log: Any) -> AsyncIterator[None]:
    """Enclose the driver's checkpoint of processes."""
    processes = [_Covered(pid, log) for pid in pids]
    await asyncio.gather(*(one.stop() for one in processes))
    over = asyncio.Event()
    watch = asyncio.create_task(_watch(processes, over))
    try:
        yield
    finally:
        over.set()
        await asyncio.shield(_ended(processes, watch))


async def _watch(processes: list[_Covered], over: asyncio.Event) -> None:
    while not over.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await over.wait()
        for one in processes:
            if not over.is_set() and one.driver_waits():
                await one.breathe()


async def _ended(processes: list[_Covered], watch: asyncio.Task[None]) -> None:
    await asyncio.wait([watch])  # a thread that it is stopping could not be stopped twice
    await asyncio.gather(*(one.cover() for one in processes))


class _Covered:
    """One process, whose threads are stopped while `_held` is set."""

    def __init__(self, pid: int, log: Any) -> None:
        self._pid = pid
        self._log = log
        self._held: SeizedProcess | None = None
        self._before: list[Span] | None = None
        self._idle: set[str] = set()  # what the driver's threads waited for before they had anything to do
        self._waits: set[str] = set()
        self._breaths = 0

    async def stop(self) -> None:
        """Stop the threads; a failure is logged."""
        try:
            held = await in_own_thread(self._seized, STOP_SECONDS + GRACE_SECONDS, late=self._let_go_late)
        except (InjectionFailed, OSError, TimeoutError) as error:
            if not has_ended(self._pid):
                self._log.warning("cuda.threads_not_stopped", pid=self._pid, error=str(error) or repr(error))
            return
        self._held = held
        self._idle = self._waits = _waits(held)

    async def cover(self) -> None:
        """Cover what was taken away, and resume the threads."""
        if self._before is None:
            return
        if self._held is None:
            await self.stop()
        held, self._held = self._held, None
        if held is not None:
            try:
                await in_own_thread(lambda: self._covered(held), STOP_SECONDS + GRACE_SECONDS)
            except (InjectionFailed, OSError, TimeoutError) as error:
                if not has_ended(self._pid):
                    self._log.warning("cuda.not_covered", pid=self._pid, error=str(error) or repr(error))

    def driver_waits(self) -> bool:
        """Return whether one of the driver's threads has been waiting for the same lock since the last look."""
        if self._held is None:
            return False
        before, self._waits = self._waits, _waits(self._held)
        return bool((self._waits & before) - self._idle)

    async def breathe(self) -> None:
        """Let the threads continue until they may have left what the driver waits for."""
        held, self._held = self._held, None
        if held is not None:
            await in_own_thread(lambda: held.__exit__(None, None, None), STOP_SECONDS + GRACE_SECONDS)
        self._breaths += 1
        if self._breaths == BREATHS:
            self._log.warning("cuda.threads_resumed", pid=self._pid, error="the driver waits for a lock of theirs")
        elif self._breaths < BREATHS:
            await asyncio.sleep(BREATH_SECONDS)
            await self.stop()

    def _seized(self) -> SeizedProcess:
        held = SeizedProcess(self._pid, spare=must_run, seconds=STOP_SECONDS)
        held.__enter__()
        self._late = held
        if self._before is None:
            self._before = shared_mappings(self._pid)
        return held

    def _let_go_late(self) -> None:
        self._late.__exit__(None, None, None)

    def _covered(self, held: SeizedProcess) -> None:
        try:
            cover(held, self._before or ())
        finally:
            held.__exit__(None, None, None)


def _waits(held: SeizedProcess) -> set[str]:
    """Return the waits for a lock that the threads are in which were not stopped: thread, call, address and stack."""
    found = set()
    for tid in held.spared:
        with suppress(OSError):
            call = Path(f"/proc/{held.pid}/task/{tid}/syscall").read_text()
            if call.split(maxsplit=1)[0] in FUTEX:
                found.add(f"{tid} {call}")
    return found
