"""What the helper keeps in mind of prefetches, whoever else forgets them, and of processes that are leaving."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog

from kybernate_shim.cuda.arena import keeper as keepers
from kybernate_shim.cuda.arena.keeper import IDLE_SECONDS, NOT_RUNNING, PREFETCH_SECONDS, Keeper, NotMoved
from kybernate_shim.cuda.workers import WorkerDied

BYTES = dict.fromkeys(("bytes", "clean_bytes", "zero_bytes", "prefetched_bytes", "left_bytes"), 0)
ANSWER: dict[str, Any] = {"code": 0, "name": "", "text": "", "seconds": 0.0, "remark": "", **BYTES}
MIB = 1 << 20


class Worker:
    """Stands in for the arena's worker; `dead` fails every job."""

    running, busy = True, False

    def __init__(self) -> None:
        self.jobs: list[str] = []
        self.leaving: list[list[int]] = []  # what each settling was told of
        self.dead = False

    async def call(self, verb: str, pid: int, *arguments: Any, seconds: float) -> dict[str, Any]:
        self.jobs.append(verb)
        if verb == "settle":
            self.leaving.append(arguments[1])
        if self.dead:
            raise WorkerDied("it is gone")
        return ANSWER

    async def close(self) -> None:
        self.jobs.append("close")


Story = Callable[[Keeper, Worker], Awaitable[None]]


@pytest.fixture
def tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Story], list[str]]:
    """Run a story with a keeper that has something of this process, and return the worker's jobs."""

    async def verb(name: str, pid: int, seconds: float) -> None:
        pass

    def run(story: Story) -> list[str]:
        async def main() -> list[str]:
            keeper, worker = Keeper(tmp_path, ((0, MIB),), verb, structlog.get_logger()), Worker()
            monkeypatch.setattr(keeper, "_worker", worker)
            monkeypatch.setattr(keeper, "kept_bytes", lambda pid: MIB)
            await story(keeper, worker)
            return worker.jobs

        return asyncio.run(main())

    return run


async def prefetch(keeper: Keeper) -> float:
    """Begin one; returns when."""
    await keeper.prefetch(os.getpid(), 1, "GPU-1", 0)
    return asyncio.get_running_loop().time()


def test_prefetch_that_nobody_uses_is_dropped_after_a_while(tell: Callable[[Story], list[str]]) -> None:
    async def story(keeper: Keeper, worker: Worker) -> None:
        began = await prefetch(keeper)
        await keeper.tidy(began + PREFETCH_SECONDS - 1)
        assert worker.jobs == ["prefetch"]
        await keeper.tidy(began + PREFETCH_SECONDS + 1)
        await keeper.tidy(began + PREFETCH_SECONDS + 2)

    assert tell(story) == ["prefetch", "drop"]


def test_prefetch_is_dropped_once_where_a_give_does_not_come(tell: Callable[[Story], list[str]]) -> None:
    async def story(keeper: Keeper, worker: Worker) -> None:
        await prefetch(keeper)
        await keeper.drop(os.getpid())
        await keeper.drop(os.getpid())

    assert tell(story) == ["prefetch", "drop"]


def test_worker_that_is_gone_took_it_along(tell: Callable[[Story], list[str]]) -> None:
    async def story(keeper: Keeper, worker: Worker) -> None:
        began = await prefetch(keeper)
        worker.dead = True
        await keeper.drop(os.getpid())
        assert (await keeper.prefetch(os.getpid(), 1, "GPU-1", 0)).reason == "it is gone"
        await keeper.tidy(began + PREFETCH_SECONDS + 1)
        await keeper.tidy(began + IDLE_SECONDS + PREFETCH_SECONDS)

    assert tell(story) == ["prefetch", "drop", "prefetch", "close"]


def test_worker_is_told_who_leaves_meanwhile(
    tell: Callable[[Story], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = os.getpid(), os.getppid()

    @asynccontextmanager
    async def stopped(pid: int) -> AsyncIterator[None]:
        yield

    async def story(keeper: Keeper, worker: Worker) -> None:
        monkeypatch.setattr(keeper, "_stopped", stopped)
        for leaving in ([], [other], [other, mine], [mine]):
            with keeper.leaving(leaving):
                with keeper.leaving(leaving):
                    pass
                await keeper.give(mine, 1)
        await keeper.give(mine, 1)
        assert worker.leaving == [[], [other], [other], [], []]

    assert tell(story) == ["settle"] * 5


class Driver:
    """Refuses the first verbs by these errors, and does the others; says which threads it found stopped."""

    def __init__(self, *errors: str) -> None:
        self.errors = list(errors)
        self.stopped = False
        self.free: list[str] = []  # verbs that found the threads free

    async def __call__(self, name: str, pid: int, seconds: float) -> None:
        if not self.stopped:
            self.free.append(name)
        if error := self.errors.pop(0) if self.errors else "":
            raise NotMoved(f"{name}: {error}", name=error)


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Driver], Awaitable[tuple[Keeper, NotMoved]]]:
    """Give this process its bytes back, which the worker cannot; return the keeper and what that raises."""

    async def run(driver: Driver) -> tuple[Keeper, NotMoved]:
        class Held:
            def __init__(self, *_: object, **__: object) -> None:
                pass

            def __enter__(self) -> None:
                driver.stopped = True

            def __exit__(self, *_: object) -> None:
                driver.stopped = False

        keeper, worker = Keeper(tmp_path, ((0, MIB),), driver, structlog.get_logger()), Worker()
        worker.dead = True
        monkeypatch.setattr(keepers, "Held", Held)
        monkeypatch.setattr(keepers, "STRANDED_SECONDS", 0.0)
        monkeypatch.setattr(keeper, "_worker", worker)
        monkeypatch.setattr(keeper, "kept_bytes", lambda pid: MIB)
        with pytest.raises(NotMoved) as caught:
            await keeper.give(os.getpid(), 1)
        return keeper, caught.value

    return run


Give = Callable[[Driver], Awaitable[tuple[Keeper, NotMoved]]]


def test_threads_stay_stopped_until_the_driver_locks_what_is_away(give: Give) -> None:
    async def main() -> None:
        driver = Driver("", "busy", "busy", "busy", "busy")
        keeper, error = await give(driver)
        assert error.away
        assert "it is gone" in str(error)  # the first error, before what followed from it
        assert "lock: busy" in str(error)
        assert os.getpid() in keeper.stranded
        assert driver.stopped
        while keeper.stranded:  # noqa: ASYNC110  # each step is a call of the driver
            await asyncio.sleep(0)
        assert not driver.stopped
        assert driver.errors == driver.free == []

    asyncio.run(main())


def test_process_whose_unlock_was_given_up_is_locked_before_it_goes_on(give: Give) -> None:
    driver = Driver("no answer")
    _, error = asyncio.run(give(driver))
    assert error.away
    assert "unlock: no answer" in str(error)
    assert driver.free == []


def test_process_that_is_locked_already_is_not_held_any_longer(give: Give) -> None:
    driver = Driver("", NOT_RUNNING)
    keeper, error = asyncio.run(give(driver))
    assert "stays locked: its memory is in the arena; it is gone" in str(error)
    assert not keeper.stranded
    assert not driver.stopped
