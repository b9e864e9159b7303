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

from kybernate_shim.cuda.arena.keeper import IDLE_SECONDS, PREFETCH_SECONDS, Keeper
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
