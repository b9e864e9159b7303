"""What the helper remembers of prefetches, and of processes that are leaving."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from kybernate_shim.arena.refusals import ArenaRefusal
from kybernate_shim.cuda_helper import arena_manager, library_calls, stopped_threads
from kybernate_shim.cuda_helper.arena_manager import ArenaManager
from kybernate_shim.cuda_helper.driver_lock import NOT_RUNNING
from kybernate_shim.cuda_helper.holders import Holders
from kybernate_shim.cuda_helper.moved import NotMoved
from kybernate_shim.cuda_helper.node_arena import IDLE_SECONDS, PREFETCH_SECONDS
from kybernate_shim.worker_protocol.cuda_jobs import ArenaJob, MoveAnswer, Settle, StateAnswer
from kybernate_shim.worker_protocol.errors import WorkerError
from kybernate_shim.worker_protocol.messages import Job

MIB = 1 << 20


class Worker:
    """Stands in for the arena's worker; `dead` fails every job."""

    running, busy = True, False

    def __init__(self) -> None:
        self.jobs: list[str] = []
        self.leaving: list[tuple[int, ...]] = []  # what each settling was told of
        self.dead = False

    async def do(self, job: ArenaJob, on_event: object = None) -> MoveAnswer:
        self.jobs.append(job.verb)
        if isinstance(job, Settle):
            self.leaving.append(job.leaving)
        if self.dead:
            raise WorkerError("it is gone")
        return MoveAnswer()

    async def close(self) -> None:
        self.jobs.append("close")


Story = Callable[[ArenaManager, Worker], Awaitable[None]]


@pytest.fixture
def tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Story], list[str]]:
    """Run a story with an arena manager that has something of this process, and return the worker's jobs."""

    async def verb(job: Job[Any], pid: int, seconds: float) -> Any:
        return StateAnswer()

    def run(story: Story) -> list[str]:
        async def main() -> list[str]:
            holders = Holders(tmp_path / "holders", [])
            manager, worker = ArenaManager(tmp_path, ((0, MIB),), verb, holders, structlog.get_logger()), Worker()
            monkeypatch.setattr(manager.arena, "worker", worker)
            monkeypatch.setattr(manager, "kept_bytes", lambda pid: MIB)
            await story(manager, worker)
            return worker.jobs

        return asyncio.run(main())

    return run


async def prefetch(manager: ArenaManager) -> float:
    """Begin one; returns when."""
    await manager.prefetch(os.getpid(), 1, "GPU-1", 0)
    return asyncio.get_running_loop().time()


def test_prefetch_that_nobody_uses_is_dropped_after_a_while(tell: Callable[[Story], list[str]]) -> None:
    async def story(manager: ArenaManager, worker: Worker) -> None:
        began = await prefetch(manager)
        await manager.tidy(began + PREFETCH_SECONDS - 1)
        assert worker.jobs == ["prefetch"]
        await manager.tidy(began + PREFETCH_SECONDS + 1)
        await manager.tidy(began + PREFETCH_SECONDS + 2)

    assert tell(story) == ["prefetch", "drop"]


def test_job_that_is_tried_again_is_no_failure_in_the_log(
    tell: Callable[[Story], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program was in the middle of an allocation, twice."""

    async def library(pid: int) -> bool:
        return True

    async def story(manager: ArenaManager, worker: Worker) -> None:
        monkeypatch.setattr(arena_manager, "has_library", library)
        answers = iter([MoveAnswer(ArenaRefusal.BUSY, "busy")] * 2 + [MoveAnswer(bytes=MIB)])

        async def do(job: ArenaJob, on_event: object = None) -> MoveAnswer:
            return next(answers)

        monkeypatch.setattr(worker, "do", do)
        with structlog.testing.capture_logs() as said:
            assert (await manager.warm(os.getpid(), 1)).bytes == MIB
        assert [(one["event"], one["log_level"]) for one in said] == [
            ("arena.job_deferred", "debug"),
            ("arena.job_deferred", "debug"),
            ("arena.warmed", "info"),
        ]
        assert not any("error" in one for one in said)

    tell(story)


def test_prefetch_is_dropped_once_where_a_give_does_not_come(tell: Callable[[Story], list[str]]) -> None:
    async def story(manager: ArenaManager, worker: Worker) -> None:
        await prefetch(manager)
        await manager.drop(os.getpid())
        await manager.drop(os.getpid())

    assert tell(story) == ["prefetch", "drop"]


def test_worker_that_is_gone_took_it_along(tell: Callable[[Story], list[str]]) -> None:
    async def story(manager: ArenaManager, worker: Worker) -> None:
        began = await prefetch(manager)
        worker.dead = True
        await manager.drop(os.getpid())
        assert (await manager.prefetch(os.getpid(), 1, "GPU-1", 0)).reason == "it is gone"
        await manager.tidy(began + PREFETCH_SECONDS + 1)
        await manager.tidy(began + IDLE_SECONDS + PREFETCH_SECONDS)

    assert tell(story) == ["prefetch", "drop", "prefetch", "close"]


def test_worker_is_told_who_leaves_meanwhile(
    tell: Callable[[Story], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = os.getpid(), os.getppid()

    @asynccontextmanager
    async def stopped(pid: int) -> AsyncIterator[None]:
        yield

    async def story(manager: ArenaManager, worker: Worker) -> None:
        monkeypatch.setattr(manager.threads, "stopped", stopped)
        for leaving in ([], [other], [other, mine], [mine]):
            with manager.leaving(leaving):
                with manager.leaving(leaving):
                    pass
                await manager.reload(mine, 1)
        await manager.reload(mine, 1)
        assert worker.leaving == [(), (other,), (other,), (), ()]

    assert tell(story) == ["settle"] * 5


class Driver:
    """Refuses the first verbs by these errors, and does the others; says which threads it found stopped."""

    def __init__(self, *errors: str) -> None:
        self.errors = list(errors)
        self.stopped = False
        self.free: list[str] = []  # verbs that found the threads free

    async def __call__(self, job: Job[Any], pid: int, seconds: float) -> Any:
        if not self.stopped:
            self.free.append(job.verb)
        if error := self.errors.pop(0) if self.errors else "":
            raise NotMoved(f"{job.verb}: {error}", name=error)
        return StateAnswer()


class PretendedHolders(Holders):
    """Says that a driver's process is stopped; `left` is who a helper before has left stopped."""

    def __init__(self, driver: Driver, left: Sequence[int] = ()) -> None:
        super().__init__(Path(), [])
        self._driver = driver
        self._left = left

    async def stop(self, pid: int, seconds: float) -> Any:
        self._driver.stopped = True
        return self._hold(pid)

    async def left_behind(self, seconds: float) -> Any:
        self._driver.stopped = bool(self._left)
        return [self._hold(pid) for pid in self._left]

    def _hold(self, pid: int) -> SimpleNamespace:
        async def let_go() -> None:
            self._driver.stopped = False

        return SimpleNamespace(pid=pid, let_go=let_go)


@pytest.fixture
def reload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Driver], Awaitable[tuple[ArenaManager, NotMoved]]]:
    """Give this process its bytes back, which the worker cannot; return the arena manager and what that raises."""

    async def run(driver: Driver) -> tuple[ArenaManager, NotMoved]:
        manager = ArenaManager(tmp_path, ((0, MIB),), driver, PretendedHolders(driver), structlog.get_logger())
        worker = Worker()
        worker.dead = True
        monkeypatch.setattr(stopped_threads, "STRANDED_SECONDS", 0.0)
        monkeypatch.setattr(manager.arena, "worker", worker)
        monkeypatch.setattr(manager, "kept_bytes", lambda pid: MIB)
        with pytest.raises(NotMoved) as caught:
            await manager.reload(os.getpid(), 1)
        return manager, caught.value

    return run


Give = Callable[[Driver], Awaitable[tuple[ArenaManager, NotMoved]]]


def test_threads_stay_stopped_until_the_driver_locks_what_is_away(reload: Give) -> None:
    async def main() -> None:
        driver = Driver("", "busy", "busy", "busy", "busy")
        manager, error = await reload(driver)
        assert error.away
        assert "it is gone" in str(error)  # the first error, before what followed from it
        assert "lock: busy" in str(error)
        assert os.getpid() in manager.stranded
        assert driver.stopped
        while manager.stranded:  # noqa: ASYNC110  # each step is a call of the driver
            await asyncio.sleep(0)
        assert not driver.stopped
        assert driver.errors == driver.free == []

    asyncio.run(main())


READY = "CUDA_ERROR_NOT_READY"


@pytest.mark.parametrize(("refusals", "takes", "moved"), [(1, 2, True), (2, 3, True), (3, 3, False)])
def test_process_that_is_not_locked_again_is_let_go_and_taken_again(
    tell: Callable[[Story], list[str]], monkeypatch: pytest.MonkeyPatch, refusals: int, takes: int, moved: bool
) -> None:
    @asynccontextmanager
    async def stopped(pid: int) -> AsyncIterator[None]:
        yield

    async def library(pid: int) -> bool:
        return True

    driver = Driver(*[error for _ in range(refusals) for error in ("", READY, "")])

    async def story(manager: ArenaManager, worker: Worker) -> None:
        monkeypatch.setattr(manager.threads, "stopped", stopped)
        monkeypatch.setattr(manager.driver, "verb", driver)
        monkeypatch.setattr(arena_manager, "has_library", library)
        found = await manager.offload(os.getpid(), 1)
        assert bool(found.reason) is not moved

    jobs = tell(story)
    assert jobs.count("offload") == takes
    assert jobs.count("settle") == refusals
    assert driver.free[-1] == "lock"


@pytest.mark.parametrize("error", [READY, "no answer"])
def test_process_with_its_memory_that_is_not_locked_again_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    async def main() -> None:
        driver = Driver("", *[error] * (1 if error == READY else 2))
        manager = ArenaManager(tmp_path, ((0, MIB),), driver, PretendedHolders(driver), structlog.get_logger())
        monkeypatch.setattr(manager.arena, "worker", Worker())
        monkeypatch.setattr(manager, "kept_bytes", lambda pid: MIB)
        await manager.reload(os.getpid(), 1)
        assert driver.errors == driver.free == []
        assert driver.stopped
        assert os.getpid() in manager.held
        await manager.tidy(0)
        assert os.getpid() in manager.held
        await manager.let_go(os.getpid())
        assert not driver.stopped
        assert not manager.held

    asyncio.run(main())


def test_held_process_runs_where_the_driver_has_to_lock_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        driver = Driver("", READY)
        manager = ArenaManager(tmp_path, ((0, MIB),), driver, PretendedHolders(driver), structlog.get_logger())
        monkeypatch.setattr(manager.arena, "worker", Worker())
        monkeypatch.setattr(manager, "kept_bytes", lambda pid: MIB)
        await manager.reload(os.getpid(), 1)
        await manager.lock_held(os.getpid(), 1)
        await manager.lock_held(os.getpid(), 1)  # not any more
        assert driver.free == ["lock"]

    asyncio.run(main())


def test_process_whose_unlock_was_given_up_is_locked_before_it_goes_on(reload: Give) -> None:
    driver = Driver("no answer")
    _, error = asyncio.run(reload(driver))
    assert error.away
    assert "unlock: no answer" in str(error)
    assert driver.free == []


def test_process_that_is_locked_already_is_not_held_any_longer(reload: Give) -> None:
    driver = Driver("", NOT_RUNNING)
    manager, error = asyncio.run(reload(driver))
    assert "stays locked: its memory is in the arena; it is gone" in str(error)
    assert not manager.stranded
    assert not driver.stopped


def take_over(folder: Path, driver: Driver) -> ArenaManager:
    """Have an arena manager take over this process, which a helper before has left stopped."""

    async def main() -> ArenaManager:
        async def gone() -> None:
            assert driver.stopped

        holders = PretendedHolders(driver, [os.getpid()])
        manager = ArenaManager(folder, ((0, MIB),), driver, holders, structlog.get_logger())
        await manager.take_over(await holders.left_behind(0), gone)
        assert os.getpid() in manager.stranded
        while manager.stranded:
            await manager.taken_over([os.getpid()])
        return manager

    return asyncio.run(main())


@pytest.mark.parametrize("errors", [[], ["", NOT_RUNNING], ["", "busy", "busy"], ["no answer"]])
def test_process_that_was_left_stopped_is_locked_before_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: list[str]
) -> None:
    monkeypatch.setattr(stopped_threads, "STRANDED_SECONDS", 0.0)
    driver = Driver(*errors)
    take_over(tmp_path, driver)
    assert not driver.stopped
    assert driver.errors == driver.free == []


def test_process_that_cannot_be_locked_goes_on_with_all_of_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of its threads was stopped in a call of its own, which the lock waits for."""
    whole = iter([False, False, True])
    monkeypatch.setattr(stopped_threads, "STRANDED_SECONDS", 0.0)
    monkeypatch.setattr(library_calls, "_undone", lambda pid, memory: next(whole))
    driver = Driver("", *["busy"] * 6)
    take_over(tmp_path, driver)
    assert list(whole) == []
    assert driver.errors == driver.free == []
