"""The helper's side of its holders (see `holder`): started, kept warm, asked, and found again by the next helper.

A holder has the stopped threads of a process, or of several that the driver checkpoints, or memory that a process has
released.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kybernate_shim.linux.private_files import make_directory
from kybernate_shim.linux.ptrace.tracee import InjectionFailed
from kybernate_shim.worker_protocol.client import WorkerClient
from kybernate_shim.worker_protocol.errors import WorkerError
from kybernate_shim.worker_protocol.holder_jobs import (
    ERRORS,
    PROGRAM,
    Cover,
    Covered,
    GiveUp,
    Held,
    Keep,
    Keeping,
    LetGo,
    ListKept,
    ListUncovered,
    Stop,
    StopUntilCovered,
)
from kybernate_shim.worker_protocol.programs import command

START_SECONDS = 20.0
GRACE_SECONDS = 5.0  # for what should have ended by its own deadline
COVER_SECONDS = 6.0  # for threads to stop, or to be covered: twice the holder's own time
KEPT_WARM = 4  # two for a process: one stops its threads, one keeps what it releases
NAME_BYTES = 4


@dataclass(frozen=True)
class Hold:
    """The stopped threads of process `pid`."""

    pid: int
    _holders: Holders
    _holder: WorkerClient

    async def let_go(self) -> None:
        """Let the threads resume. The holder waits for a thread that is blocked in the kernel."""
        with suppress(WorkerError, TimeoutError):  # it ended, and the process with it
            await self._holder.do(LetGo(), seconds=GRACE_SECONDS)
            self._holders.take_back(self._holder)


@dataclass(frozen=True)
class Custody:
    """Memory of process `pid` that it has released: `keeping` says which descriptors of which process lead to it."""

    pid: int
    keeping: Keeping
    _holders: Holders
    _holder: WorkerClient

    async def give_up(self, blocks: int) -> None:
        """Give up the first `blocks` of those that were kept."""
        with suppress(WorkerError, TimeoutError):  # it ended, and they are closed
            await self._holder.do(GiveUp(blocks), seconds=GRACE_SECONDS)

    async def end(self) -> None:
        """Give up all of it."""
        with suppress(WorkerError, TimeoutError):
            await self._holder.do(LetGo(), seconds=GRACE_SECONDS)
            self._holders.take_back(self._holder)


@dataclass
class Uncovered:
    """Processes `pids` whose threads are stopped until they are covered; `failures` are those that are not, and why.

    Calls are made one after the other.
    """

    pids: frozenset[int]
    failures: tuple[tuple[int, str], ...]
    _holders: Holders
    _holder: WorkerClient

    async def cover(self, pids: Iterable[int]) -> Covered:
        """Cover those of them that the driver is done with. Raises InjectionFailed: none is left to be covered."""
        try:
            covered = await self._holder.do(Cover(tuple(pids)), seconds=COVER_SECONDS)
        except (WorkerError, TimeoutError) as error:
            self.pids = frozenset()
            self._holders.give_up(self._holder)
            raise InjectionFailed(f"the process that holds them: {error!r}") from error
        self.pids -= frozenset(pids)
        if not self.pids:
            self._holders.take_back(self._holder)
        return covered


class Holders:
    """The holders of one helper; `folder` has their sockets, and `helper` is the command of another helper."""

    def __init__(self, folder: Path, helper: Sequence[str]) -> None:
        self._folder = folder
        self._helper = tuple(helper)
        self._idle: list[WorkerClient] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._undoing: set[asyncio.Task[None]] = set()

    def prepare(self, number: int) -> None:
        """Have `number` holders ready soon, so that no process stays frozen while one starts."""
        for _ in range(number - len(self._idle) - len(self._starting)):
            self._starting.add(task := asyncio.create_task(self._start_spare()))
            task.add_done_callback(self._starting.discard)

    async def stop(self, pid: int, seconds: float) -> Hold:
        """Stop the threads of a process that need not work. Raises InjectionFailed with nothing stopped."""
        try:
            return await self._stop(await self._take(), pid, seconds)
        except WorkerError:  # one that was warm may have been killed
            pass
        try:
            return await self._stop(await self._start(), pid, seconds)
        except WorkerError as error:
            raise InjectionFailed(f"the process that holds them: {error}") from error

    async def _stop(self, holder: WorkerClient, pid: int, seconds: float) -> Hold:
        """Do as `stop` does, by one holder. Raises InjectionFailed, and a WorkerError where the holder has ended."""
        try:
            await holder.do(Stop(pid, seconds, self._helper), seconds=seconds + GRACE_SECONDS)
        except WorkerError:
            holder.close()
            raise
        except InjectionFailed:
            self.take_back(holder)
            raise
        except BaseException as error:
            self.give_up(holder)
            if isinstance(error, TimeoutError):
                raise InjectionFailed(f"the kernel did not stop all of them within {seconds:g} s") from None
            raise
        return Hold(pid, self, holder)

    async def keep(self, pid: int, worker: int, descriptors: tuple[tuple[int, int], ...]) -> Custody:
        """Keep the memory behind a worker's descriptors, which process `pid` is about to release.

        Raises InjectionFailed with nothing kept.
        """
        holder = await self._take()
        try:
            keeping = await holder.do(Keep(pid, worker, descriptors, self._helper), seconds=GRACE_SECONDS)
        except (WorkerError, TimeoutError) as error:
            holder.close()
            raise InjectionFailed(f"the process that is to keep released memory: {error!r}") from error
        except InjectionFailed:
            self.take_back(holder)
            raise
        return Custody(pid, keeping, self, holder)

    async def stop_until_covered(self, pids: Iterable[int], *, by_caller: bool) -> Uncovered:
        """Stop the threads of processes that the driver is about to checkpoint.

        Raises InjectionFailed, with nothing stopped.
        """
        wanted = tuple(pids)
        holder = await self._take()
        try:
            failures = await holder.do(StopUntilCovered(wanted, by_caller, self._helper), seconds=COVER_SECONDS)
        except BaseException as error:
            self.give_up(holder)
            if isinstance(error, WorkerError | TimeoutError):
                raise InjectionFailed(f"the process that is to hold them: {error!r}") from error
            raise
        return Uncovered(frozenset(wanted), failures, self, holder)

    async def left_behind(self, seconds: float) -> list[Hold | Custody | Uncovered]:
        """Return what earlier helpers left stopped or kept, from holders that answer within `seconds`."""
        if not self._folder.is_dir():
            return []
        found = await asyncio.gather(*(self._find(path, seconds) for path in sorted(self._folder.iterdir())))
        return [hold for hold in found if hold is not None]

    async def close(self) -> None:
        """Release the holders that hold nothing; they end. The others keep running until another helper starts."""
        for task in self._starting:
            task.cancel()
        for holder in self._idle:
            holder.close()
        self._idle.clear()

    def take_back(self, holder: WorkerClient) -> None:
        """Keep a holder that holds nothing any more; a surplus one ends."""
        if len(self._idle) < KEPT_WARM:
            self._idle.append(holder)
        else:
            holder.close()

    def give_up(self, holder: WorkerClient) -> None:
        """Have a holder release what an unanswered request has stopped, and end."""
        self._undoing.add(task := asyncio.create_task(_undo(holder)))
        task.add_done_callback(self._undoing.discard)

    async def _take(self) -> WorkerClient:
        """Return a holder that is ready, or start one. Raises InjectionFailed."""
        while self._starting and not self._idle:
            await asyncio.wait(self._starting, return_when=asyncio.FIRST_COMPLETED)
        while self._idle:
            if (holder := self._idle.pop()).alive:
                return holder
            holder.close()
        return await self._start()

    async def _start_spare(self) -> None:
        with suppress(InjectionFailed):  # the next caller that needs a holder gets the reason
            self._idle.append(await self._start())

    async def _start(self) -> WorkerClient:
        try:
            async with asyncio.timeout(START_SECONDS):
                make_directory(self._folder)
                path = self._folder / secrets.token_hex(NAME_BYTES)
                process = await asyncio.create_subprocess_exec(*command(PROGRAM, str(path)))
                if status := await process.wait():  # it keeps running as a separate process
                    raise InjectionFailed(f"the process that is to hold them ended with status {status}")
                holder, _ = await _connected(path)
                return holder
        except (OSError, WorkerError) as error:  # TimeoutError among them
            raise InjectionFailed(f"the process that is to hold them cannot be started: {error!r}") from error

    async def _find(self, path: Path, seconds: float) -> Hold | Custody | Uncovered | None:
        try:
            async with asyncio.timeout(seconds):
                holder, pid = await _connected(path)
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)  # of one that was killed
        except (OSError, WorkerError):
            pass  # it has just ended
        else:
            if pid:
                return Hold(pid, self, holder)
            with suppress(WorkerError, TimeoutError):  # one of another release keeps nothing
                keeping = await holder.do(ListKept(), seconds=seconds)
                if keeping.descriptors:
                    return Custody(keeping.pid, keeping, self, holder)
                if pids := await holder.do(ListUncovered(), seconds=seconds):
                    return Uncovered(frozenset(pids), (), self, holder)
            holder.close()
        return None


async def _connected(path: Path) -> tuple[WorkerClient, int]:
    """Connect to a holder, and return which process it holds, or 0. Raises OSError and a WorkerError."""
    holder = WorkerClient(*await asyncio.open_unix_connection(str(path)), f"the holder at {path}", ERRORS)
    try:
        return holder, await holder.do(Held())
    except BaseException:
        holder.close()
        raise


async def _undo(holder: WorkerClient) -> None:
    """Do as `Holders.give_up` says. A holder does one request after the other."""
    with suppress(WorkerError):
        await holder.do(LetGo())
    holder.close()
