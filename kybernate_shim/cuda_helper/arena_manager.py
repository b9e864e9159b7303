"""The order in which a locked process's VRAM is moved into the arena and back, and how each step is undone.

    stop its threads, unlock, move, lock, resume its threads

A process that has released its memory can be locked before all of that is in the arena (see `copies`).

Only the preload library's thread and the driver's own threads run while the driver is unlocked: no program thread can
see that memory is missing (`stopped_threads.py`). The process is LOCKED before and after, with its bytes in one place.
When a move fails, or the worker dies during it, the bytes are brought back to VRAM before the threads resume. Where
that fails too, the process stays locked, and the error says so.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kybernate_shim.arena.refusals import ArenaRefusal
from kybernate_shim.cuda_helper.copies import Copies
from kybernate_shim.cuda_helper.driver_lock import NOT_READY, DriverLock, DriverVerb
from kybernate_shim.cuda_helper.holders import Custody, Hold, Holders
from kybernate_shim.cuda_helper.library_calls import has_library, shut
from kybernate_shim.cuda_helper.moved import Moved, NotMoved, each_once, moved
from kybernate_shim.cuda_helper.node_arena import NodeArena
from kybernate_shim.cuda_helper.stopped_threads import StoppedThreads
from kybernate_shim.linux.process import has_ended
from kybernate_shim.linux.ptrace.tracee import InjectionFailed
from kybernate_shim.sizes import NodeSizes
from kybernate_shim.worker_protocol.cuda_jobs import Expect, MoveAnswer, Offload, Prefetch, Settle, Warm
from kybernate_shim.worker_protocol.errors import WorkerError
from kybernate_shim.worker_protocol.messages import changed

ATTEMPTS = 12  # a program that allocates without pause is caught between two allocations
FINISH_SECONDS = 120.0  # for what the worker of an earlier helper has not copied
UNLOCKABLE = 3  # attempts after which the driver offloads a process that it does not lock again
PAUSES = (0.002, 0.005, 0.011, 0.023)
NONE_COMING = "", 0.0
NO_ARENA = "there is no arena on this node: gpu.arena is not set"


class ArenaManager:
    """Moves VRAM into the node's arena and back. One step per process at a time; several processes concurrently."""

    def __init__(
        self, folder: Path, sizes: NodeSizes, verb: DriverVerb, holders: Holders, log: Any, share: float = 1.0
    ) -> None:
        """`share` of the arena is what one pod or container may have."""
        self.arena = NodeArena(folder, sizes, share, log)
        self.driver = DriverLock(verb)
        self.threads = StoppedThreads(self.arena, self.driver, holders, log)
        self.copies = Copies(self.arena, holders, log)
        self._holders = holders
        self._log = log
        self._leaving: Counter[int] = Counter()  # processes whose bytes are leaving VRAM

    async def configure(self, sizes: NodeSizes, share: float) -> None:
        """Use other settings as soon as no job needs the present ones."""
        await self.arena.configure(sizes, share)

    async def warm(self, pid: int, seconds: float) -> Moved:
        """Get contexts and pinned memory ready for a running process, so that it is not frozen for that."""
        if not self.arena.sizes or not await has_library(pid):
            return Moved()
        for pause in PAUSES:
            try:
                answer = await self.arena.do(Warm(pid, seconds))
            except WorkerError as error:
                return Moved(0, str(error))
            if answer.refusal is not ArenaRefusal.BUSY:
                break
            await asyncio.sleep(pause)
        return moved(answer)

    async def take_over(self, found: Collection[Hold | Custody], gone: Callable[[], Awaitable[object]]) -> None:
        """Begin to end the steps of a helper before this one, which has left threads stopped, or memory kept.

        `gone` returns when nothing that the earlier helper started works on it any more.
        """
        holds = [one for one in found if not isinstance(one, Custody)]
        for one in found:
            if isinstance(one, Custody):
                self.copies.take_over(one, gone, FINISH_SECONDS)
        if holds:
            await gone()
            self.threads.take_over(holds)

    async def taken_over(self, pids: Iterable[int]) -> None:
        """Wait until the processes that were left stopped resume, but not for long: then they are `stranded`."""
        await self.threads.taken_over(pids)

    async def ready(self, pids: Iterable[int]) -> None:
        """Get ready to stop those of the processes that have the library."""
        if self.arena.sizes:
            self._holders.prepare(2 * sum(await asyncio.gather(*(has_library(pid) for pid in set(pids)))))

    async def shut(self, pids: Iterable[int]) -> None:
        """Keep the only process that has the library, and is locked next, from beginning an allocation for a moment.

        With several such processes, one might wait for what another one is about to do.
        """
        known = [pid for pid in pids if self.arena.sizes and await has_library(pid)]
        if len(known) == 1:
            await shut(known[0])

    @contextmanager
    def leaving(self, pids: Iterable[int]) -> Iterator[None]:
        """Slow down reloads of others to the same GPU that begin meanwhile: these processes need its link, too."""
        wanted = Counter(pids)
        self._leaving += wanted
        try:
            yield
        finally:
            self._leaving -= wanted

    async def expect(self, pid: int, seconds: float, gpus: Sequence[str]) -> Moved:
        """Get contexts on `gpus` ready, and the room that `pid` has claimed for processes that are not restored yet."""
        if not self.arena.sizes:
            return Moved()
        try:
            return moved(await self.arena.do(Expect(pid, seconds, tuple(gpus))))
        except WorkerError as error:
            return Moved(0, str(error))

    async def prefetch(self, pid: int, seconds: float, gpu: str, free: int, *, room_comes: bool = False) -> Moved:
        """Begin to copy the bytes of a process to `gpu`, where the driver is restoring it, but leave `free` bytes.

        `room_comes`: another process is giving up room there, which is waited for. The memory there is the worker's
        until they are reloaded, or the process is checkpointed again.
        """
        if not self.kept_bytes(pid):
            return Moved()
        try:
            return moved(await self.arena.prefetch(Prefetch(pid, seconds, gpu, free, room_comes)))
        except WorkerError as error:
            return Moved(0, str(error))

    async def drop(self, pid: int) -> None:
        """Give up what was prefetched, if there is any."""
        await self.arena.drop(pid)

    async def offload(self, pid: int, seconds: float) -> Moved:
        """Move the VRAM of a locked process into the arena, as far as it was allocated through the preload library.

        Where that cannot be, it stays where it was, and the reason is returned. Raises NotMoved.
        """
        if not self.arena.sizes:
            return Moved(0, NO_ARENA)
        if not await has_library(pid):
            return Moved(0, f"process {pid} has not loaded the arena's library")
        await self.copied(pid, seconds)
        unlockable = 0
        for attempt in range(ATTEMPTS):
            try:
                with self.leaving([pid]):
                    async with self.threads.stopped(pid):
                        answer = await self._offload_stopped(pid, seconds)
            except InjectionFailed as error:
                return Moved(0, f"the threads of process {pid} cannot be stopped: {error}")
            if answer.refusal not in (ArenaRefusal.BUSY, ArenaRefusal.UNLOCKED):
                return moved(answer)
            # It was resumed unlocked, to come out of its allocation, or of what keeps the driver from locking it.
            await asyncio.sleep(PAUSES[attempt % len(PAUSES)])
            await shut(pid)
            await self.driver.lock(pid, seconds)
            unlockable += answer.refusal is ArenaRefusal.UNLOCKED
            if unlockable == UNLOCKABLE:
                return Moved(0, f"with its threads stopped, the driver did not lock process {pid}: {answer.text}")
        return Moved(0, f"process {pid} was allocating memory, or forking, at each of {ATTEMPTS} attempts")

    async def _offload_stopped(self, pid: int, seconds: float) -> MoveAnswer:
        await self.driver.unlock(pid)
        try:
            answer = await self.arena.do(Offload(pid, seconds))
            if answer.refusal is None and answer.bytes:
                answer = await self.copies.begin(pid, seconds, answer)
        except WorkerError as error:
            answer = MoveAnswer(ArenaRefusal.FAILED, str(error))
        if answer.refusal is ArenaRefusal.BUSY:
            return answer
        if answer.refusal not in (None, ArenaRefusal.FULL):
            await self._settle(pid, seconds, answer.text)
        try:
            await self.driver.relock(pid)
        except NotMoved as error:
            await self._settle(pid, seconds, str(error))
            if error.name != NOT_READY:
                raise
            self._log.warning("arena.not_locked_again", pid=pid, error=str(error))
            return changed(answer, refusal=ArenaRefusal.UNLOCKED, text=str(error))
        return answer

    async def copied(self, pid: int, seconds: float) -> None:
        """Return when the arena has all that a process has released. Raises NotMoved: the process must stay locked."""
        await self.copies.ended(pid, seconds)

    async def reload(self, pid: int, seconds: float, coming: tuple[str, float] = NONE_COMING) -> Moved:
        """Move a locked process's bytes back from the arena, if there are any. Raises NotMoved: it is locked then.

        `coming` is the GPU on which another process gives up room for that, and the seconds within which some is free.
        A process that the driver does not lock again, because it waits for a thread that is stopped, is `held` then.
        """
        if not self.kept_bytes(pid) and pid not in self.stranded:
            return Moved()
        await self.copies.waited_for(pid)
        try:
            async with self.threads.stopped(pid) as hold:
                try:
                    await self.driver.unlock(pid)
                except NotMoved as error:  # the driver may have carried it out all the same
                    raise await self._locked_away(pid, [str(error)]) from error
                answer = await self._settle(pid, seconds, "its memory is in the arena", coming)
                await self._lock_or(hold, pid)
        except InjectionFailed as error:
            raise NotMoved(f"the threads of process {pid} cannot be stopped: {error}", away=True) from error
        return moved(answer)

    async def _lock_or(self, hold: Callable[[], None], pid: int) -> None:
        """Lock a stopped process that has its memory back, or `hold` it. Raises NotMoved where it has ended."""
        try:
            await self.driver.relock(pid)
        except NotMoved as error:
            if has_ended(pid):
                raise
            self._log.warning("arena.threads_kept_stopped", pid=pid, error=str(error))
            hold()

    @property
    def held(self) -> Collection[int]:
        """Processes with all of their memory whose threads are stopped in place of the driver's lock."""
        return self.threads.held

    async def let_go(self, pid: int) -> None:
        """Let the threads of a process resume, if it is `held`."""
        await self.threads.let_go(pid)

    async def lock_held(self, pid: int, seconds: float) -> None:
        """Have the driver lock a process that is `held`, whose threads run for that. Raises NotMoved: they run then."""
        if pid in self.held:
            await self.threads.let_go(pid)
            await self.driver.lock(pid, seconds)

    @property
    def stranded(self) -> Collection[int]:
        """Processes whose threads stay stopped: their memory is in the arena, or may be, and they are not locked."""
        return self.threads.stranded

    def kept_bytes(self, pid: int) -> int:
        """Return how many bytes of this process the arena has, or may have."""
        return self.arena.kept_bytes(pid)

    async def tidy(self, now: float) -> None:
        """Release what no job has needed for a while: prefetched memory, and the worker with its contexts."""
        await self.copies.tidy()
        await self.threads.tidy()
        if await self.arena.tidy(now):
            await self._holders.close()

    async def close(self) -> None:
        await self.copies.close()
        await self.arena.worker.close()
        await self._holders.close()

    async def _settle(self, pid: int, seconds: float, why: str, coming: tuple[str, float] = NONE_COMING) -> MoveAnswer:
        """Bring all bytes of a stopped and unlocked process back to VRAM; return the answer on what was away.

        It is tried twice, the second time by another worker, unless the process itself is at fault: no process may end
        the worker that others use. Where both fail, or the GPU has no room, the process is locked again, with its bytes
        still in the arena, and NotMoved raised.
        """
        reasons = [why]
        try:
            await self.copied(pid, seconds)  # a library that is in the driver can answer now
        except NotMoved as error:
            raise await self._locked_away(pid, [why, str(error)]) from error
        leaving = tuple(other for other in self._leaving if other != pid)
        for hashing in (True, False):  # which it needs not have
            try:
                answer = await self.arena.do(Settle(pid, seconds, hashing, leaving, *coming))
                self.arena.reloaded(pid)
            except WorkerError as error:
                reasons.append(str(error))
                continue
            if answer.refusal is None:
                return answer
            reasons.append(answer.text)
            if answer.refusal is ArenaRefusal.NO_ROOM:
                break
            if answer.refusal is not ArenaRefusal.LIBRARY and not self.arena.worker.busy:  # with another process
                await self.arena.worker.close()
        raise await self._locked_away(pid, reasons)

    async def _locked_away(self, pid: int, reasons: list[str]) -> NotMoved:
        """Lock a stopped process whose bytes could not be brought back, for `reasons`; return what to raise.

        Where it cannot be locked, for example while one of its calls hangs in the driver, its threads stay stopped
        until it can: it must not compute without its memory.
        """
        stays = "locked"
        try:
            await self.driver.relock(pid)
        except NotMoved as error:
            if has_ended(pid):
                return NotMoved(f"process {pid} has ended: {each_once(reasons)}")
            reasons.append(str(error))
            self.threads.stranded.add(pid)
            stays = "locked: its threads are stopped until the driver locks it"
        return NotMoved(f"process {pid} stays {stays}: {each_once(reasons)}", away=True)
