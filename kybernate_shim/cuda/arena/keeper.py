"""The order in which a locked process gives its VRAM to the arena, or gets it back, and the way back from each step.

    stop its threads, unlock, move, lock, let them go

Only the preload library's thread and the driver's own run while the driver is unlocked: nobody sees that memory is
missing. Where it is, the library keeps placeholders, on which a program would compute as on its own memory; so the
kernel kills the process if the helper ends before the driver is locked again. The process comes LOCKED and leaves
LOCKED, with its bytes in one place. When a move fails, or the worker dies under it, a settling brings them back to VRAM
before the threads go on; where not even that can be done, the process stays locked, and the error says so. The helper
itself stops the threads: it does not load the driver, so nothing that the driver does lets them go too early.

Whatever looks at a process may have to wait for it, and a tenant's process may want that: nothing here waits in the
event loop, or in threads that others need, and everything has a deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kybernate_shim.config import NodeSizes
from kybernate_shim.cuda.apart import apart
from kybernate_shim.cuda.arena import control
from kybernate_shim.cuda.arena.banks import as_text
from kybernate_shim.cuda.arena.memory import Memory, Owner
from kybernate_shim.cuda.arena.shared_worker import SharedWorker
from kybernate_shim.cuda.workers import DriverUnavailable, WorkerDied
from kybernate_shim.linux.process import has_ended
from kybernate_shim.linux.ptrace import Held
from kybernate_shim.linux.tracee import InjectionFailed

STOP_SECONDS = 10.0
RELOCK_SECONDS = 10.0
GRACE_SECONDS = 5.0  # for a look at a process, and for what should have ended by its own deadline
ATTEMPTS = 12  # a program that allocates without pause is caught between two allocations
PAUSES = (0.002, 0.005, 0.011, 0.023)
SHUT_SECONDS = 0.2  # in which allocations that were begun may end before the driver locks the process
LOOK_SECONDS = 0.0005  # between two looks at whether they have
IDLE_SECONDS = 60.0
STRANDED_SECONDS = 1.0  # between two attempts to lock a process that could not be locked
PREFETCH_SECONDS = 30.0  # that its memory is kept for a give
DRIVERS_OWN = "cuda"  # what the names of the driver's threads begin with
NO_ARENA = "there is no arena on this node: gpu.arena is not set"
BUSY, FULL, NO_ROOM, FAILED = "ARENA_BUSY", "ARENA_FULL", "ARENA_NO_ROOM", "ARENA_FAILED"
NOT_RUNNING = "CUDA_ERROR_ILLEGAL_STATE"  # the driver's answer to a lock of what is locked, or checkpointed
LIBRARY = "ARENA_LIBRARY"  # the process does not answer, or lies


class NotMoved(Exception):
    """A step failed; the message says which, and where the bytes are. `away` when the process must not be unlocked.

    `name` is the driver's name for the error, if a verb of it was refused.
    """

    def __init__(self, message: str, *, away: bool = False, name: str = "") -> None:
        super().__init__(message)
        self.away = away
        self.name = name


@dataclass(frozen=True)
class Moved:
    """What was moved, and the `reason` where that is nothing, or not all that the library has allocated.

    `spared` of the bytes needed no copy: the arena had them already, or they are zeros.
    """

    bytes: int = 0
    reason: str = ""
    spared: int = 0


# Calls a verb of the driver on one process, for at most so many seconds; raises NotMoved when it does not succeed.
DriverVerb = Callable[[str, int, float], Awaitable[None]]


class Keeper:
    """The arena of the node, as the helper uses it. One step of one process at a time; several processes at once."""

    def __init__(self, folder: Path, sizes: NodeSizes, verb: DriverVerb, log: Any, share: float = 1.0) -> None:
        """`share` of the arena is what one pod or container may have."""
        self._folder = folder
        self._verb = verb
        self._log = log
        self._wanted = sizes, share
        self._use(sizes, share)
        self._jobs = 0
        self._last_use = 0.0
        self._prefetched: dict[int, float] = {}  # by pid, since when
        self._leaving: Counter[int] = Counter()  # what is on its way out of VRAM
        self._remarks: set[str] = set()
        self._stranded: set[int] = set()  # processes that stay stopped because they cannot be locked
        self._keeping: dict[int, asyncio.Task[None]] = {}  # by pid, what waits for that

    def _use(self, sizes: NodeSizes, share: float) -> None:
        self._in_use = self._sizes, _ = sizes, share
        self._memory = Memory(sizes, self._folder)
        self._worker = SharedWorker(["arena", str(self._folder), as_text(sizes), str(share)])

    async def configure(self, sizes: NodeSizes, share: float) -> None:
        """Use other settings, from the next job on, or once those that run have ended: their worker maps what is there.

        What the arena has of processes stays. It grows with its next job; it is made again, smaller or divided
        otherwise, when no process has anything but copies there, and gives out no more than is wanted until then.
        """
        self._wanted = sizes, share
        if self._jobs or self._prefetched:
            return
        if self._wanted != self._in_use:
            before = self._worker
            self._use(sizes, share)
            self._log.info("arena.configured", sizes=as_text(sizes), share=share)
            await before.close()
        await self._give_back()

    async def _give_back(self) -> None:
        """Let go of an arena that is larger than it is wanted, as soon as no process needs it.

        Where the machine does not have what is wanted, what is there stays in use.
        """
        memory = self._memory
        if self._jobs or self._prefetched or not (memory.surplus and memory.possible and memory.vacant):
            return
        await self._worker.close()  # it has mapped and pinned what is there
        if not self._jobs and self._memory.give_back():
            self._log.info("arena.given_back", sizes=as_text(self._sizes))

    async def warm(self, pid: int, seconds: float) -> Moved:
        """Get contexts and pinned memory ready for a running process, so that it need not stand still for that."""
        if not self._sizes or not await _has_library(pid):
            return Moved()
        for pause in PAUSES:
            try:
                answer = await self._ask("warm", pid, seconds)
            except (WorkerDied, DriverUnavailable) as error:
                return Moved(0, str(error))
            if answer["name"] != BUSY:
                break
            await asyncio.sleep(pause)
        return _moved(answer)

    async def shut(self, pids: Iterable[int]) -> None:
        """Keep the one of them that has the library, and is locked next, from beginning an allocation for a moment.

        Of several, one might wait for what another one is about to do.
        """
        known = [pid for pid in pids if self._sizes and await _has_library(pid)]
        if len(known) == 1:
            await _shut(known[0])

    @contextmanager
    def leaving(self, pids: Iterable[int]) -> Iterator[None]:
        """Bring others' bytes back to the same card more slowly, if they begin meanwhile: these need its link, too."""
        wanted = Counter(pids)
        self._leaving += wanted
        try:
            yield
        finally:
            self._leaving -= wanted

    async def expect(self, pid: int, seconds: float, gpus: Sequence[str]) -> Moved:
        """Get contexts on `gpus` ready, and the room that `pid` has claimed for processes that are not restored yet."""
        if not self._sizes:
            return Moved()
        try:
            return _moved(await self._ask("expect", pid, seconds, list(gpus)))
        except (WorkerDied, DriverUnavailable) as error:
            return Moved(0, str(error))

    async def prefetch(self, pid: int, seconds: float, gpu: str, free: int) -> Moved:
        """Begin to copy the bytes of a process to `gpu`, which the driver restores it to just now, but leave `free`.

        Their memory there is the worker's until they are given, or the process is checkpointed again.
        """
        if not self.kept_bytes(pid):
            return Moved()
        try:
            answer = await self._ask("prefetch", pid, seconds, gpu, free)
        except (WorkerDied, DriverUnavailable) as error:
            return Moved(0, str(error))
        self._prefetched[pid] = self._last_use
        return _moved(answer)

    async def drop(self, pid: int) -> None:
        """Give up what was prefetched, if there is any."""
        if self._prefetched.pop(pid, None) is not None and self._worker.running:
            try:
                await self._ask("drop", pid, RELOCK_SECONDS)
            except (WorkerDied, DriverUnavailable):
                pass  # it has gone with the worker

    async def take(self, pid: int, seconds: float) -> Moved:
        """Move the VRAM of a locked process into the arena, as far as it was allocated through the preload library.

        Where that cannot be, it stays where it was, and the reason is returned. Raises NotMoved.
        """
        if not self._sizes:
            return Moved(0, NO_ARENA)
        if not await _has_library(pid):
            return Moved(0, f"process {pid} has not loaded the arena's library")
        for attempt in range(ATTEMPTS):
            try:
                with self.leaving([pid]):
                    async with self._stopped(pid):
                        answer = await self._take_stopped(pid, seconds)
            except InjectionFailed as error:
                return Moved(0, f"the threads of process {pid} cannot be stopped: {error}")
            if answer["name"] != BUSY:
                return _moved(answer)
            # It was let go unlocked, to come out of its allocation.
            await asyncio.sleep(PAUSES[attempt % len(PAUSES)])
            await _shut(pid)
            await self._verb("lock", pid, seconds)
        return Moved(0, f"process {pid} was in the middle of an allocation {ATTEMPTS} times")

    async def _take_stopped(self, pid: int, seconds: float) -> dict[str, Any]:
        await self._verb("unlock", pid, RELOCK_SECONDS)
        try:
            answer = await self._ask("take", pid, seconds)
        except (WorkerDied, DriverUnavailable) as error:
            answer = {"code": 1, "name": FAILED, "text": str(error)}
        if answer["name"] == BUSY:
            return answer
        if answer["name"] not in ("", FULL):
            await self._settle(pid, seconds, answer["text"])
        try:
            await self._relock(pid)
        except NotMoved as error:
            await self._settle(pid, seconds, str(error))
            raise
        return answer

    async def give(self, pid: int, seconds: float) -> Moved:
        """Move a locked process's bytes back from the arena, if there are any. Raises NotMoved: it is locked then."""
        if not self.kept_bytes(pid):
            return Moved()
        try:
            async with self._stopped(pid):
                try:
                    await self._verb("unlock", pid, RELOCK_SECONDS)
                except NotMoved as error:  # the driver may have carried it out all the same
                    raise await self._locked_away(pid, [str(error)]) from error
                answer = await self._settle(pid, seconds, "its memory is in the arena")
                await self._relock(pid)
        except InjectionFailed as error:
            raise NotMoved(f"the threads of process {pid} cannot be stopped: {error}", away=True) from error
        return _moved(answer)

    @property
    def stranded(self) -> Collection[int]:
        """Processes whose threads stay stopped: their memory is in the arena, and the driver does not lock them."""
        return self._stranded

    def kept_bytes(self, pid: int) -> int:
        """Return how many bytes of this process the arena has, or may have."""
        try:
            note = self._memory.note(Owner.of(pid))
            return sum(one.size for one in (*note.kept, *note.pending))
        except (FileNotFoundError, ProcessLookupError):
            return 0

    async def tidy(self, now: float) -> None:
        """End the worker, whose contexts take VRAM, when nobody has needed it for a while.

        And what was prefetched for processes that whoever asked for it has left, being killed, maybe.
        """
        for pid in [pid for pid, since in self._prefetched.items() if now - since > PREFETCH_SECONDS]:
            await self.drop(pid)
        await self.configure(*self._wanted)
        if self._worker.running and not self._worker.busy and now - self._last_use > IDLE_SECONDS:
            await self._worker.close()
            self._log.info("arena.worker_ended")

    async def close(self) -> None:
        await self._worker.close()

    async def _settle(self, pid: int, seconds: float, why: str) -> dict[str, Any]:
        """Bring everything of a stopped and unlocked process back to VRAM; return the answer on what had been away.

        Tried twice, the second time by another worker, unless the process itself is at fault: no process ends the
        worker for others. Where both fail, or the card has no room, the process is locked again, with its bytes still
        in the arena, and NotMoved raised.
        """
        reasons = [why]
        leaving = [other for other in self._leaving if other != pid]
        for hashing in (True, False):  # which it needs not have
            try:
                answer = await self._ask("settle", pid, seconds, hashing, leaving)
                self._prefetched.pop(pid, None)
            except (WorkerDied, DriverUnavailable) as error:
                reasons.append(str(error))
                continue
            if not answer["code"]:
                return answer
            reasons.append(answer["text"])
            if answer["name"] == NO_ROOM:
                break
            if answer["name"] != LIBRARY and not self._worker.busy:  # with another process
                await self._worker.close()
        raise await self._locked_away(pid, reasons)

    async def _locked_away(self, pid: int, reasons: list[str]) -> NotMoved:
        """Lock a stopped process whose bytes could not be brought back, for `reasons`; return what to raise.

        Where it cannot be locked, as while a call of its own hangs in the driver, its threads stay stopped until it
        can: it must not compute without its memory.
        """
        stays = "locked"
        try:
            await self._relock(pid)
        except NotMoved as error:
            if has_ended(pid):
                return NotMoved(f"process {pid} has ended: {_each_once(reasons)}")
            reasons.append(str(error))
            self._stranded.add(pid)
            stays = "locked, by its threads, which are stopped until the driver locks it"
        return NotMoved(f"process {pid} stays {stays}: {_each_once(reasons)}", away=True)

    async def _relock(self, pid: int) -> None:
        """Lock a stopped process, also where a call that was given up has locked it already. Raises NotMoved."""
        try:
            await self._verb("lock", pid, RELOCK_SECONDS)
        except NotMoved as first:
            if first.name == NOT_RUNNING:
                return
            try:
                await self._verb("lock", pid, RELOCK_SECONDS)
            except NotMoved as second:
                if second.name != NOT_RUNNING:
                    raise first from None

    async def _keep_stopped(self, pid: int, let_go: Callable[[], None]) -> None:
        """Let a process's threads go when it is locked, or has ended."""
        while not has_ended(pid):
            with suppress(NotMoved):
                await self._relock(pid)
                break
            await asyncio.sleep(STRANDED_SECONDS)
        await _let_go(let_go)
        self._stranded.discard(pid)
        self._log.info("arena.stopped_threads_ended", pid=pid)

    async def _ask(self, verb: str, pid: int, seconds: float, *arguments: Any) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        self._last_use = loop.time()
        self._jobs += 1
        try:
            answer = await self._worker.call(verb, pid, *arguments, seconds=seconds)
        finally:
            self._jobs -= 1
            self._last_use = loop.time()
        told = {"error": answer["text"]} if answer["code"] else {}
        moved = {key: answer[key] for key in ("bytes", "clean_bytes", "zero_bytes", "prefetched_bytes")}
        self._log.info(f"arena.{verb}", pid=pid, **moved, seconds=round(answer["seconds"], 3), **told)
        self._tell_once(answer["remark"])
        return answer

    def _tell_once(self, remark: str) -> None:
        """Log what makes every move slower than it could be, and no failure of any."""
        if remark and remark not in self._remarks:
            self._remarks.add(remark)
            self._log.warning("arena.all_copied", error=remark)

    @asynccontextmanager
    async def _stopped(self, pid: int) -> AsyncIterator[None]:
        """Stop every thread but those that have to work. Raises InjectionFailed with nothing stopped."""
        if pid in self._stranded:
            raise InjectionFailed("they are stopped already, until the driver locks the process")
        held = Held(pid, spare=_must_run, seconds=STOP_SECONDS, tied=True)

        def let_go() -> None:
            held.__exit__(None, None, None)

        try:
            await apart(held.__enter__, STOP_SECONDS + GRACE_SECONDS, late=let_go)
        except TimeoutError:
            raise InjectionFailed(f"the kernel did not stop all of them within {STOP_SECONDS:g} s") from None
        try:
            yield
        finally:
            if pid in self._stranded:
                self._keeping[pid] = asyncio.create_task(self._keep_stopped(pid, let_go))
                self._keeping[pid].add_done_callback(lambda _: self._keeping.pop(pid, None))
            else:
                await asyncio.shield(_let_go(let_go))


async def _let_go(let_go: Callable[[], None]) -> None:
    with suppress(TimeoutError):  # the thread that holds them goes on trying
        await apart(let_go, STOP_SECONDS + GRACE_SECONDS)


async def _shut(pid: int) -> None:
    with suppress(TimeoutError):
        await apart(partial(_shut_now, pid), SHUT_SECONDS + GRACE_SECONDS)


def _shut_now(pid: int) -> None:
    """Have the library hold threads off from allocations, and wait for those that are in one.

    It is only for speed: what is wrong shows when the memory is asked for, and older libraries cannot do this.
    """
    until = time.monotonic() + SHUT_SECONDS
    with suppress(control.ControlInvalid, control.ControlSilent, OSError):
        if page := control.control_of(pid):
            with page:
                while _in_allocation(page) and time.monotonic() < until:
                    time.sleep(LOOK_SECONDS)


def _in_allocation(page: control.Control) -> bool:
    try:
        page.ask(control.Verb.SHUT, seconds=SHUT_SECONDS)
    except control.ControlFailed as error:
        return error.busy
    return False


def _must_run(thread: str) -> bool:
    return thread == control.NAME or thread.startswith(DRIVERS_OWN)


async def _has_library(pid: int) -> bool:
    """Tell whether the library is loaded; a process that cannot be looked at goes the driver's way."""
    try:
        return await apart(partial(control.is_there, pid), GRACE_SECONDS)
    except (OSError, TimeoutError):
        return False


def _each_once(reasons: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(reasons))


def _moved(answer: dict[str, Any]) -> Moved:
    if answer["code"]:
        return Moved(0, answer["text"])
    left = answer["left_bytes"]
    reason = f"{left >> 20} MiB that the program exports, binds or maps in parts go the driver's way" if left else ""
    return Moved(answer["bytes"], reason, answer["clean_bytes"] + answer["zero_bytes"])
