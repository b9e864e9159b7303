"""Which suspended containers are watched, how often one use is reported, and what counts as none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ClassVar

import pytest

from kybernate.agent.seats import watching
from kybernate.agent.seats.claims import Key
from kybernate.agent.seats.turn_files import TurnFiles
from kybernate.agent.seats.watching import UseWatch

A, B = ("default", "a"), ("default", "b")
PIDS = {A: 1, B: 2}


class FakeContainer:
    """A container whose use the test decides."""

    made: ClassVar[dict[int, FakeContainer]] = {}

    def __init__(self, first: int, before: object = None) -> None:
        self.used = self.closed = False
        self.looks, self.before = 0, before
        self.made[first] = self

    def is_used(self) -> bool:
        return self.used

    def look(self) -> None:
        self.looks += 1

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def containers(monkeypatch: pytest.MonkeyPatch) -> dict[int, FakeContainer]:
    FakeContainer.made = {}
    monkeypatch.setattr(watching, "Container", FakeContainer)
    monkeypatch.setattr(watching, "IDLE_SECONDS", 0.001)
    monkeypatch.setattr(watching, "TICK_SECONDS", 0.001)
    return FakeContainer.made


async def until(look: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not look():  # noqa: ASYNC110  # of another task
            await asyncio.sleep(0.001)


def watch(body: Callable[[UseWatch, set[Key], list[Key]], object]) -> None:
    async def main() -> None:
        suspended: set[Key] = set()
        told: list[Key] = []
        one = UseWatch(PIDS.get)
        task = asyncio.create_task(one.run(lambda: suspended, told.append))
        try:
            await body(one, suspended, told)  # type: ignore[misc]
        finally:
            task.cancel()
            await asyncio.wait([task])
        await until(lambda: all(container.closed for container in FakeContainer.made.values()))

    asyncio.run(main())


def test_use_of_what_is_suspended_is_reported_once_in_a_while() -> None:
    async def body(one: UseWatch, suspended: set[Key], told: list[Key]) -> None:
        suspended |= {A, B}
        await until(lambda: {1, 2} <= FakeContainer.made.keys() and FakeContainer.made[2].looks)
        assert told == []
        FakeContainer.made[1].used = True
        await until(lambda: told == [A])
        suspended.discard(A)
        await until(lambda: FakeContainer.made[1].closed)
        suspended.add(A)
        await until(lambda: not FakeContainer.made[1].closed)
        FakeContainer.made[1].used = True
        await until(lambda: told == [A, A])
        assert not FakeContainer.made[2].closed

    watch(body)


def test_sleep_on_request_is_settled_before_or_after_the_container_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "switches_of", lambda first: {(first, first): 7})

    async def body(one: UseWatch, suspended: set[Key], told: list[Key]) -> None:
        one.settle(B)
        suspended |= {A, B}
        await until(lambda: {1, 2} <= FakeContainer.made.keys())
        assert (FakeContainer.made[1].before, FakeContainer.made[2].before) == (None, {(2, 2): 7})
        one.settle(A)
        await until(lambda: FakeContainer.made[1].before == {(1, 1): 7})

    watch(body)


def test_program_that_waits_for_its_turn_is_a_use_until_that_is_settled() -> None:
    class Files(TurnFiles):
        awaited: ClassVar[set[Key]] = {B}

        def is_awaited(self, key: Key) -> bool:
            return key in self.awaited

        def settle(self, key: Key) -> None:
            self.awaited.discard(key)

    async def main() -> None:
        told: list[Key] = []
        one = UseWatch(PIDS.get, Files())
        task = asyncio.create_task(one.run(lambda: {A, B}, told.append))
        await until(lambda: told)
        assert told == [B]
        one.settle(B)
        assert not Files.awaited
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(main())
