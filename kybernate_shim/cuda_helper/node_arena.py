"""The node's arena as the helper uses it: its settings, its one worker, and what the worker holds between jobs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from kybernate_shim.arena.banks import as_text
from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.arena.refusals import ArenaRefusal
from kybernate_shim.cuda_helper.log_events import event_of
from kybernate_shim.cuda_helper.shared_worker import SharedWorker
from kybernate_shim.sizes import NodeSizes
from kybernate_shim.worker_protocol.client import OnEvent
from kybernate_shim.worker_protocol.cuda_jobs import ArenaJob, Drop, MoveAnswer, Prefetch
from kybernate_shim.worker_protocol.errors import WorkerError

IDLE_SECONDS = 60.0
PREFETCH_SECONDS = 30.0  # that prefetched memory is kept for a reload
DROP_SECONDS = 10.0


class NodeArena:
    """The arena in `folder`. `memory`, `sizes` and `worker` are replaced when other settings come into use."""

    def __init__(self, folder: Path, sizes: NodeSizes, share: float, log: Any) -> None:
        """`share` of the arena is what one pod or container may have."""
        self._folder = folder
        self._log = log
        self._wanted = sizes, share
        self._use(sizes, share)
        self._jobs = 0
        self._last_use = 0.0
        self._prefetched: dict[int, float] = {}  # by pid, since when
        self._remarks: set[str] = set()

    def _use(self, sizes: NodeSizes, share: float) -> None:
        self.in_use = self.sizes, _ = sizes, share
        self.memory = Memory(sizes, self._folder)
        self.worker = SharedWorker(["arena", str(self._folder), as_text(sizes), str(share)])

    async def configure(self, sizes: NodeSizes, share: float) -> None:
        """Use other settings, from the next job on, or once running jobs have ended: their worker maps what is there.

        What the arena has of processes stays. It grows with its next job. It is made again, smaller or divided
        differently, when processes have only copies there, and until then hands out no more than the new size.
        """
        self._wanted = sizes, share
        if self._jobs or self._prefetched:
            return
        if self._wanted != self.in_use:
            before = self.worker
            self._use(sizes, share)
            self._log.info("arena.configured", sizes=as_text(sizes), share=share)
            await before.close()
        await self._give_back()

    async def _give_back(self) -> None:
        """Release an arena that is larger than configured, as soon as no process needs it.

        Where the machine lacks the memory for a new one, the present arena stays in use.
        """
        memory = self.memory
        if self._jobs or self._prefetched or not (memory.surplus and memory.possible and memory.vacant):
            return
        await self.worker.close()  # it has mapped and pinned what is there
        if not self._jobs and self.memory.give_back():
            self._log.info("arena.given_back", sizes=as_text(self.sizes))

    def kept_bytes(self, pid: int) -> int:
        """Return how many bytes of this process the arena has, or may have."""
        try:
            record = self.memory.record(ArenaOwner.of(pid))
            return sum(one.size for one in (*record.kept, *record.pending))
        except (FileNotFoundError, ProcessLookupError):
            return 0

    async def do(self, job: ArenaJob, on_event: OnEvent = lambda event: None) -> MoveAnswer:
        """Have the worker do a job. Raises WorkerError."""
        loop = asyncio.get_running_loop()
        self._last_use = loop.time()
        self._jobs += 1
        try:
            answer = await self.worker.do(job, on_event)
        finally:
            self._jobs -= 1
            self._last_use = loop.time()
        self._log_job(job, answer)
        return answer

    def _log_job(self, job: ArenaJob, answer: MoveAnswer) -> None:
        """Log a job that has ended; what only slows every move down is logged once."""
        if answer.refusal is ArenaRefusal.BUSY:  # it is tried again; the caller that gives up says so
            self._log.debug("arena.job_deferred", pid=job.pid, verb=job.verb)
            return
        error = {"error": answer.text} if answer.refusal else {}
        self._log.info(
            event_of("arena", job.verb),
            pid=job.pid,
            bytes=answer.bytes,
            clean_bytes=answer.clean_bytes,
            zero_bytes=answer.zero_bytes,
            prefetched_bytes=answer.prefetched_bytes,
            seconds=round(answer.seconds, 3),
            **error,
        )
        if answer.remark and answer.remark not in self._remarks:
            self._remarks.add(answer.remark)
            self._log.warning("arena.not_hashed", error=answer.remark)

    async def prefetch(self, job: Prefetch) -> MoveAnswer:
        """Begin to copy the bytes of a process to its GPU, where they are the worker's until a reload, or a drop."""
        answer = await self.do(job)
        self._prefetched[job.pid] = self._last_use
        return answer

    async def drop(self, pid: int) -> None:
        """Give up what was prefetched, if there is any."""
        if self._prefetched.pop(pid, None) is not None and self.worker.running:
            try:
                await self.do(Drop(pid, DROP_SECONDS))
            except WorkerError:
                pass  # the worker's end has dropped it

    def reloaded(self, pid: int) -> None:
        """Note that a process has received what was prefetched for it."""
        self._prefetched.pop(pid, None)

    async def tidy(self, now: float) -> bool:
        """End the worker, whose contexts take VRAM, when no job has needed it for a while; return whether it was ended.

        Also drop what was prefetched for a client that never asked for the reload, for example because it was killed.
        """
        for pid in [pid for pid, since in self._prefetched.items() if now - since > PREFETCH_SECONDS]:
            await self.drop(pid)
        await self.configure(*self._wanted)
        if not self.worker.running or self.worker.busy or now - self._last_use <= IDLE_SECONDS:
            return False
        await self.worker.close()
        self._log.info("arena.worker_ended")
        return True
