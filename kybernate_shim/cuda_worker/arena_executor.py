"""What the arena's worker does to one process whose threads are stopped and whose driver is unlocked.

    warm     make contexts and pin memory, while the program still computes
    expect   the same for programs that are not restored yet, in room that is already claimed for them
    offload  get every block ready to be copied, where the arena has room for it
    copy     copy every block out, and have the program release it
    finish   copy what the program has released and another worker, which died, has not copied
    prefetch copy to the GPU what a settle will bring there, while the driver still restores the program
    drop     forget what was prefetched: no settle will come
    settle   finish, towards VRAM, whatever an earlier job began and did not finish, and reload what the arena has

A worker that dies between two steps leaves bytes that are in VRAM, or confirmed in the arena's record, or both. VRAM
that the program has released is kept by a holder's descriptors (see `offload`).

A job waits only for its own process, in its own thread, and for no longer than the time that the helper gave it. What a
job shares with other jobs, it holds for no longer than its own driver calls take.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

from kybernate_shim.arena.control import BlockState, ControlFailed, ControlUnusable, Verb
from kybernate_shim.arena.extents import total
from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.arena.records import Record
from kybernate_shim.arena.refusals import ArenaRefusal
from kybernate_shim.cuda_worker.calls import DriverRefused
from kybernate_shim.cuda_worker.copier import ArenaCopier, gpus_named
from kybernate_shim.cuda_worker.deadline import JobDeadline
from kybernate_shim.cuda_worker.finish import finish
from kybernate_shim.cuda_worker.offload import PendingOffload, Tell
from kybernate_shim.cuda_worker.prefetch import ArenaPrefetch
from kybernate_shim.cuda_worker.program_blocks import movable, opened, require_possible
from kybernate_shim.cuda_worker.room import RoomWait
from kybernate_shim.cuda_worker.settle import Settling
from kybernate_shim.errors import Busy, NoRoom
from kybernate_shim.linux.kernel_text import plain
from kybernate_shim.sizes import NO_NODE
from kybernate_shim.worker_protocol.cuda_jobs import (
    Copy,
    Drop,
    Expect,
    Finish,
    MoveAnswer,
    MoveJob,
    Offload,
    Prefetch,
    Settle,
    Warm,
)
from kybernate_shim.worker_protocol.messages import JobDone, changed
from kybernate_shim.worker_protocol.server import JobCall

OUT_OF_MEMORY = 2  # the driver's
FAILURES = (ControlFailed, ControlUnusable, DriverRefused, NoRoom, Busy, OSError)


@dataclass
class ArenaExecutor:
    """The arena and our end of the copies, which are made when the first process needs them."""

    memory: Memory
    _transfer: ArenaCopier | None = None
    _making: threading.Lock = field(default_factory=threading.Lock)
    _prefetches: dict[ArenaOwner, ArenaPrefetch] = field(default_factory=dict)
    _offloads: dict[ArenaOwner, PendingOffload] = field(default_factory=dict)  # that are ready to be copied
    _left: dict[int, set[int]] = field(default_factory=dict)  # by pid, the GPUs that its bytes were copied from last

    def do(self, job: MoveJob, call: JobCall) -> JobDone:
        """Do a job; what prevents it is its answer."""
        match job:
            case Warm():
                return job.done_by(self.warm)
            case Expect():
                return job.done_by(self.expect)
            case Offload():
                return job.done_by(self.offload)
            case Copy():
                return job.done_by(partial(self.copy, tell=call.tell))
            case Finish():
                return job.done_by(self.finish)
            case Prefetch():
                return job.done_by(self.prefetch)
            case Drop():
                return job.done_by(self.drop)
            case Settle():
                return job.done_by(self.settle)
        assert_never(job)

    def warm(self, job: Warm) -> MoveAnswer:
        return _answered(lambda: self._warm(job.pid, JobDeadline(job.seconds)))

    def expect(self, job: Expect) -> MoveAnswer:
        return _answered(lambda: self._expect(job.pid, job.gpus))

    def offload(self, job: Offload) -> MoveAnswer:
        return _answered(lambda: self._offload(job.pid, JobDeadline(job.seconds)))

    def copy(self, job: Copy, tell: Tell) -> MoveAnswer:
        return _answered(lambda: self._copy(job.pid, JobDeadline(job.seconds), tell, early=job.early))

    def finish(self, job: Finish) -> MoveAnswer:
        return _answered(lambda: self._finish(job, JobDeadline(job.seconds)))

    def prefetch(self, job: Prefetch) -> MoveAnswer:
        return _answered(lambda: self._prefetch(job))

    def drop(self, job: Drop) -> MoveAnswer:
        return _answered(lambda: self._drop(job.pid))

    def settle(self, job: Settle) -> MoveAnswer:
        return _answered(lambda: self._settle(job, JobDeadline(job.seconds)))

    def _warm(self, pid: int, job: JobDeadline) -> MoveAnswer:
        """Examine one block of each of the program's GPUs to learn which GPU of ours that is."""
        copies = self._copies()
        nodes: dict[int, int] = {}  # that the program's GPUs are near
        owner = ArenaOwner.of(pid)
        with self.memory.using(owner, job.left()), opened(owner, job) as program:
            blocks = movable(program.blocks())
            require_possible(pid, blocks, copies.capacity)
            try:
                for device, index in {block.device: block.index for block in blocks}.items():
                    program.ask(Verb.SHARE, first=index, count=1)
                    for block in program.blocks(index, 1):
                        if block.state is BlockState.SHARED:
                            gpu = copies.enter_device_of(program.descriptor_of(block))
                            nodes[device] = copies.node_near(gpu)
            finally:
                program.undo(Verb.CLOSE)
                program.undo(Verb.FORGET)
        sizes = tuple((nodes.get(block.device, NO_NODE), block.size) for block in blocks)
        copies.pin(self.memory.preview(owner, sizes))
        return MoveAnswer(bytes=sum(size for _, size in sizes))

    def _expect(self, pid: int, gpus: Sequence[str]) -> MoveAnswer:
        """First read what has been claimed: it may be handed over meanwhile. No bytes are read there."""
        record = self.memory.record(ArenaOwner.of(pid))
        copies = self._copies()
        copies.enter_named(gpus)
        copies.pin(extent for extent in record.room if not extent.is_hole)
        return MoveAnswer(bytes=sum(one.size for one in (*record.kept, *record.pending)))

    def _prefetch(self, job: Prefetch) -> MoveAnswer:
        """Begin a prefetch, which ends with the next job for the process."""
        owner = ArenaOwner.of(job.pid)
        self._drop(job.pid)
        record = self.memory.record(owner)
        self._prefetches[owner] = ArenaPrefetch(
            self.memory, self._copies(), job.gpu, record, job.free_bytes, room_comes=job.room_comes
        )
        return MoveAnswer()

    def _drop(self, pid: int) -> MoveAnswer:
        for owner in list(self._prefetches):
            if owner.pid == pid and (prefetch := self._prefetches.pop(owner, None)):
                prefetch.close()
        return MoveAnswer()

    def _offload(self, pid: int, job: JobDeadline) -> MoveAnswer:
        """Get an offload ready; what it needs is kept until it is copied, or settled."""
        copies = self._copies()  # or there is no arena, and nothing has to be undone
        self._drop(pid)  # of bytes that are about to change
        owner = ArenaOwner.of(pid)
        self._abandon(owner)
        with ExitStack() as stack:
            stack.enter_context(self.memory.using(owner, job.left()))
            program = stack.enter_context(opened(owner, job))
            offload = PendingOffload(self.memory, copies, owner, program, stack.enter_context(ExitStack()))
            answer = offload.prepare()
            if answer.bytes:
                self._left[pid] = offload.gpus
                offload.stack = stack.pop_all()
                self._offloads[owner] = offload
        return answer

    def _copy(self, pid: int, job: JobDeadline, tell: Tell, *, early: bool) -> MoveAnswer:
        offload = self._offloads.pop(ArenaOwner.of(pid), None)
        if offload is None:
            raise ControlUnusable(f"nothing of process {pid} is ready to be copied")
        with offload.stack:
            return offload.copy(job, tell, early=early)

    def _finish(self, job: Finish, deadline: JobDeadline) -> MoveAnswer:
        owner = ArenaOwner.of(job.pid)
        self._abandon(owner)
        with self.memory.using(owner, deadline.left()), opened(owner, deadline) as program:
            return finish(self.memory, self._copies(), owner, program, job.keeper, dict(job.descriptors))

    def _abandon(self, owner: ArenaOwner) -> None:
        """Forget what was got ready for a copy that was not requested."""
        if (offload := self._offloads.pop(owner, None)) is not None:
            with offload.stack:
                offload.abandon()

    def _settle(self, wanted: Settle, job: JobDeadline) -> MoveAnswer:
        owner = ArenaOwner.of(wanted.pid)
        self._abandon(owner)
        gently, room = partial(self._shares_gpu, wanted.leaving), self._room_wait(wanted, job)
        with self.memory.using(owner, job.left()), opened(owner, job) as program:
            settling = Settling(self.memory, self._copies, owner, program, gently, wanted.hashing, room)
            settling.undo_begun()
            record = self.memory.record(owner)
            with self._prefetched(owner, record) as prefetch:
                try:
                    return settling.reload(record, prefetch)
                except ControlFailed as error:
                    if error.code != OUT_OF_MEMORY or prefetch is None or not prefetch.stop().size:
                        raise
            # Another process has come meanwhile: there was no room for both.
            return settling.reload(record, None)

    def _room_wait(self, wanted: Settle, job: JobDeadline) -> RoomWait | None:
        """Return the room that another process is giving up, if it is on a GPU that is here, and not there already."""
        if not wanted.room_seconds:
            return None
        copies, size = self._copies(), total(self.memory.record(ArenaOwner.of(wanted.pid)).room)
        for gpu in gpus_named([wanted.room_gpu]):
            if copies.free(gpu) < size:
                return RoomWait(partial(copies.free, gpu), wanted.room_seconds, job.check)
        return None

    def _shares_gpu(self, leaving: Collection[int], gpus: Collection[int]) -> bool:
        """Return whether a process that is being offloaded may have bytes on one of these GPUs, as far as known."""
        return not all(self._left.get(pid, set(gpus)).isdisjoint(gpus) for pid in leaving)

    @contextmanager
    def _prefetched(self, owner: ArenaOwner, record: Record) -> Iterator[ArenaPrefetch | None]:
        """Yield what prefetches `record`, which is dropped then."""
        prefetch = self._prefetches.get(owner)
        try:
            yield prefetch if prefetch is not None and prefetch.record == record else None
        finally:
            self._drop(owner.pid)

    def _copies(self) -> ArenaCopier:
        """Return our end, which maps the arena as it is from then on. Raises OSError."""
        with self._making:
            if self._transfer is None:
                try:
                    self.memory.prepare()
                except OSError:
                    if not self.memory.size:  # or what is there can be used, and has to be given back
                        raise
                self._transfer = ArenaCopier(self.memory)
            return self._transfer


def _answered(work: Callable[[], MoveAnswer]) -> MoveAnswer:
    """Turn what a move raises into its answer, with its duration."""
    began = time.monotonic()
    try:
        answer = work()
    except FAILURES as error:
        answer = MoveAnswer(_refusal_of(error), plain(str(error)))
    except Exception as error:  # noqa: BLE001  # no process may end the worker, which others need
        traceback.print_exc()
        answer = MoveAnswer(ArenaRefusal.FAILED, plain(repr(error)))
    return changed(answer, seconds=time.monotonic() - began)


def _refusal_of(error: Exception) -> ArenaRefusal:
    if isinstance(error, NoRoom):
        return ArenaRefusal.FULL
    if isinstance(error, ControlFailed) and error.busy:
        return ArenaRefusal.BUSY
    if isinstance(error, ControlFailed) and error.code == OUT_OF_MEMORY:
        return ArenaRefusal.NO_ROOM
    if isinstance(error, ControlUnusable):
        return ArenaRefusal.LIBRARY  # the program's own doing, and no fault of the worker's
    return ArenaRefusal.FAILED
