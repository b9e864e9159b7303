"""A port that does not accept is tried by one task, however many requests wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kybernate.proxy import models
from kybernate.proxy.models import Ports

ADDRESS = "http://127.0.0.1:1"


class Tries:
    """Each try of a port, which a test lets end."""

    def __init__(self) -> None:
        self.begun: list[asyncio.Future[None]] = []

    async def port_accepts(self, upstream: str) -> None:
        self.begun.append(future := asyncio.get_running_loop().create_future())
        await future


def run(monkeypatch: pytest.MonkeyPatch, test: Callable[[Ports, Tries], Awaitable[None]]) -> None:
    tries = Tries()
    monkeypatch.setattr(models, "port_accepts", tries.port_accepts)

    async def running() -> None:
        await test(Ports(), tries)

    asyncio.run(running())


async def waiting(ports: Ports, count: int) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(ports.accepts(ADDRESS)) for _ in range(count)]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


def test_requests_share_the_tries_of_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(ports: Ports, tries: Tries) -> None:
        tasks = await waiting(ports, 50)
        assert len(tries.begun) == 1
        tasks.pop().cancel()  # its deadline has passed, or its client is gone
        tries.begun[0].set_result(None)
        await asyncio.gather(*tasks)

    run(monkeypatch, test)


def test_port_is_not_tried_for_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(ports: Ports, tries: Tries) -> None:
        for task in await waiting(ports, 3):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)
        assert tries.begun[0].cancelled()
        (again,) = await waiting(ports, 1)
        tries.begun[1].set_result(None)
        await again

    run(monkeypatch, test)


def test_port_that_refuses_again_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request that has seen it accept is refused before the other ones have seen that."""

    async def test(ports: Ports, tries: Tries) -> None:
        first, second = await waiting(ports, 2)
        tries.begun[0].set_result(None)
        await first
        (again,) = await waiting(ports, 1)
        await second
        assert len(tries.begun) == 2
        tries.begun[1].set_result(None)
        await again

    run(monkeypatch, test)
