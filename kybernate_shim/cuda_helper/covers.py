"""What keeps a program alive that polls its GPU while the driver checkpoints it: see `linux.ptrace.covers`.

Its threads are stopped until memory covers what the driver has taken away. They may have a lock that the driver waits
for, such as the heap's: then they continue for a moment. A process whose threads cannot be stopped, because a debugger
has them, is checkpointed all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from contextlib import suppress
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
BREATH_SECONDS: Final = 0.005  # in which a thread leaves the heap; twice as long each time, for one that forks
LONGEST_SECONDS: Final = 0.08
BREATHS: Final = 16  # then they continue until the driver is done
FUTEX: Final = frozenset(str(number) for number in NUMBERS.values())
CONTENDED: Final = ("0x80", "0x2")  # FUTEX_WAIT_PRIVATE for 2, as for a mutex of glibc: nothing idle waits so


class Covers:
    """The processes of one call. `by_caller`: their threads are stopped by the caller, which covers them."""

    def __init__(self, pids: Iterable[int], log: Any, *, by_caller: bool = False) -> None:
        self._processes = {pid: Covered(pid, log, by_caller=by_caller) for pid in pids}
        self._over = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    async def stop(self) -> None:
        """Stop the threads, before the driver is called; `end` has to follow."""
        await asyncio.gather(*(one.stop() for one in self._processes.values()))
        self._watch = asyncio.create_task(attend(self._processes.values(), self._over))

    async def end(self, done: Collection[int]) -> list[Covered]:
        """Cover what the driver has taken away of the processes that it is `done` with; return the others.

        Of these, a call that was given up may still take it away. Their threads stay stopped.
        """
        self._over.set()
        if self._watch is not None:
            await asyncio.wait([self._watch])  # a thread that it is stopping could not be stopped twice
        await asyncio.gather(*(one.cover() for pid, one in self._processes.items() if pid in done))
        return [one for pid, one in self._processes.items() if pid not in done]


async def attend(processes: Collection[Covered], over: asyncio.Event) -> None:
    """Keep the threads of processes stopped, as far as the driver can work then, until it is `over`."""
    while not over.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await over.wait()
        for one in processes:
            if not over.is_set():
                await one.look()


class Covered:
    """One process, whose threads are stopped while `_held` is set."""

    def __init__(self, pid: int, log: Any, *, by_caller: bool = False) -> None:
        self.pid = pid
        self._log = log
        self._by_caller = by_caller
        self._held: SeizedProcess | None = None
        self._before: list[Span] | None = None
        self._idle: set[str] = set()  # what the driver's threads wait for while they have nothing to do
        self._waits: set[str] = set()
        self._breaths = 0

    async def stop(self) -> None:
        """Stop the threads; a failure is logged."""
        try:
            held = await in_own_thread(self._seized, STOP_SECONDS + GRACE_SECONDS, late=self._let_go_late)
        except (InjectionFailed, OSError, TimeoutError) as error:
            if not (has_ended(self.pid) or self._by_caller):
                self._log.warning("cuda.threads_not_stopped", pid=self.pid, error=str(error) or repr(error))
            return
        self._held = held
        self._waits = _waits(held)
        self._idle = {wait for wait in self._waits if not _is_for_mutex(wait)}

    async def cover(self) -> None:
        """Cover what was taken away, and resume the threads."""
        if self._held is None and self._before is not None:
            await self.stop()
        held, self._held = self._held, None
        if held is not None:
            try:
                await in_own_thread(lambda: self._covered(held), STOP_SECONDS + GRACE_SECONDS)
            except (InjectionFailed, OSError, TimeoutError) as error:
                if not has_ended(self.pid):
                    self._log.warning("cuda.not_covered", pid=self.pid, error=str(error) or repr(error))

    async def look(self) -> None:
        """Stop the threads of which the caller has let go, and resume those that have what the driver waits for."""
        if self._held is None:
            if self._by_caller and self._breaths < BREATHS:
                await self.stop()
            return
        before, self._waits = self._waits, _waits(self._held)
        if (self._waits & before) - self._idle:
            await self._breathe()

    async def _breathe(self) -> None:
        """Let the threads continue until they may have left what the driver waits for."""
        held, self._held = self._held, None
        if held is not None:
            await in_own_thread(lambda: held.__exit__(None, None, None), STOP_SECONDS + GRACE_SECONDS)
        self._breaths += 1
        if self._breaths == BREATHS:
            self._log.warning("cuda.threads_resumed", pid=self.pid, error="the driver waits for a lock of theirs")
        elif self._breaths < BREATHS:
            await asyncio.sleep(min(BREATH_SECONDS * 2 ** (self._breaths - 1), LONGEST_SECONDS))
            await self.stop()

    def _seized(self) -> SeizedProcess:
        if self._before is None:
            self._before = shared_mappings(self.pid)
        held = SeizedProcess(self.pid, spare=must_run, seconds=STOP_SECONDS)
        held.__enter__()
        self._late = held
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


def _is_for_mutex(wait: str) -> bool:
    """Return whether such a wait is for a mutex, or for the lock of the heap, which some other thread has."""
    _, _, _, *arguments = wait.split()
    return tuple(arguments[:2]) == CONTENDED
