"""What becomes of copies whose worker, or whose program, ends; the worker, the holders and the GPU are pretended."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
import structlog

from kybernate_shim.arena.refusals import ArenaRefusal
from kybernate_shim.cuda_helper.copies import ATTEMPTS, Copies
from kybernate_shim.cuda_helper.holders import Custody, Holders
from kybernate_shim.cuda_helper.moved import NotMoved
from kybernate_shim.cuda_helper.node_arena import NodeArena
from kybernate_shim.linux.ptrace.tracee import InjectionFailed
from kybernate_shim.worker_protocol.cuda_jobs import ArenaJob, Copied, Copy, Finish, MemoryReleased, MoveAnswer
from kybernate_shim.worker_protocol.errors import WorkerError
from kybernate_shim.worker_protocol.holder_jobs import Keeping
from kybernate_shim.worker_protocol.messages import Encoded, encoded

PAIRS = ((0, 10), (1, 11), (2, 12))
READY = MoveAnswer(bytes=6, worker=99, descriptors=PAIRS)
COPIED = MoveAnswer(bytes=6)


class Keeper:
    """Stands in for a Custody: what it was asked for."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.keeping = Keeping(pid, 77, PAIRS)
        self.asked: list[object] = []

    async def give_up(self, blocks: int) -> None:
        self.asked.append(blocks)

    async def end(self) -> None:
        self.asked.append("end")


class Arena:
    """Stands in for the node's arena. `answers` are those to its jobs, in order; an exception is raised."""

    def __init__(self) -> None:
        self.answers: list[MoveAnswer | Exception] = []
        self.events: list[MemoryReleased | Copied] = []
        self.jobs: list[ArenaJob] = []
        self.closed = 0
        self.copying = asyncio.Event()
        self.worker = self
        self.busy = False

    async def do(self, job: ArenaJob, on_event: Callable[[Encoded], None] = lambda event: None) -> MoveAnswer:
        self.jobs.append(job)
        if isinstance(job, Copy):
            for event in self.events:
                on_event(encoded(event))
            await self.copying.wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        self.closed += 1


class Stage:
    """The copies of a process, and everything around them."""

    def __init__(self, pid: int, *, refuses: bool = False) -> None:
        self.pid = pid
        self.arena = Arena()
        self.keeper = Keeper(pid)
        self._refuses = refuses
        self.copies = Copies(cast(NodeArena, self.arena), cast(Holders, self), structlog.get_logger())

    async def keep(self, pid: int, worker: int, descriptors: tuple[tuple[int, int], ...]) -> Custody:
        assert (pid, worker, descriptors) == (self.pid, 99, PAIRS)
        if self._refuses:
            raise InjectionFailed("no holder")
        return cast(Custody, self.keeper)

    async def begin(
        self, *answers: MoveAnswer | Exception, events: tuple[MemoryReleased | Copied, ...] = ()
    ) -> MoveAnswer:
        self.arena.answers, self.arena.events = list(answers), list(events)
        if not events:
            self.arena.copying.set()
        return await self.copies.begin(self.pid, 1.0, READY)

    async def ended(self) -> None:
        self.arena.copying.set()
        await self.copies.ended(self.pid, 1.0)


def played(story: Callable[[], Awaitable[Any]]) -> None:
    async def main() -> None:
        await story()

    asyncio.run(main())


def test_release_is_waited_for_and_not_the_copies() -> None:
    async def story() -> None:
        stage = Stage(os.getpid())
        assert await stage.begin(COPIED, events=(MemoryReleased(), Copied(2))) is READY
        assert stage.arena.jobs == [Copy(stage.pid, 1.0, early=True)]
        await stage.ended()
        assert stage.keeper.asked == [2, "end"]
        await stage.ended()  # nothing is left
        assert len(stage.arena.jobs) == 1

    played(story)


def test_without_a_keeper_nothing_is_released_early() -> None:
    async def story() -> None:
        stage = Stage(os.getpid(), refuses=True)
        assert await stage.begin(COPIED) is COPIED
        assert stage.arena.jobs == [Copy(stage.pid, 1.0, early=False)]
        await stage.ended()

    played(story)


def test_another_worker_finishes_what_the_keeper_has() -> None:
    async def story() -> None:
        stage = Stage(os.getpid())
        await stage.begin(WorkerError("it is gone"), MoveAnswer(bytes=4), events=(MemoryReleased(), Copied(1)))
        await stage.ended()
        assert stage.arena.jobs[1:] == [Finish(stage.pid, 1.0, 77, PAIRS)]
        assert stage.keeper.asked == [1, "end"]
        assert not stage.arena.closed

    played(story)


def test_memory_is_kept_until_the_copies_are_finished() -> None:
    async def story() -> None:
        stage = Stage(os.getpid())
        refused = MoveAnswer(ArenaRefusal.FAILED, "no driver")
        await stage.begin(WorkerError("it is gone"), *[refused] * ATTEMPTS, COPIED, events=(MemoryReleased(),))
        with pytest.raises(NotMoved, match=r"stays locked, and its memory on the GPU: it is gone; no driver") as caught:
            await stage.ended()
        assert caught.value.away
        assert stage.keeper.asked == []
        assert stage.arena.closed == ATTEMPTS - 1
        await stage.ended()  # another call tries again
        assert stage.keeper.asked == ["end"]

    played(story)


def test_program_that_has_ended_leaves_nothing_kept() -> None:
    async def story() -> None:
        process = subprocess.Popen(["true"])  # noqa: ASYNC220  # a moment
        process.wait()
        stage = Stage(process.pid)
        await stage.begin(WorkerError("it is gone"), events=(MemoryReleased(),))
        await stage.copies.tidy()
        assert stage.keeper.asked == []  # it may still be copied
        stage.arena.copying.set()
        await stage.copies.waited_for(stage.pid)
        await stage.copies.tidy()
        assert stage.keeper.asked == ["end"]
        assert len(stage.arena.jobs) == 1

    played(story)


def test_copies_of_an_earlier_helper_are_finished_when_its_worker_is_gone() -> None:
    async def story() -> None:
        stage = Stage(os.getpid())
        stage.arena.answers = [COPIED]
        gone = asyncio.Event()
        stage.copies.take_over(cast(Custody, stage.keeper), gone.wait, 5.0)
        await asyncio.sleep(0)
        assert stage.arena.jobs == []
        gone.set()
        await stage.ended()
        assert stage.arena.jobs == [Finish(stage.pid, 5.0, 77, PAIRS)]
        assert stage.keeper.asked == ["end"]

    played(story)
