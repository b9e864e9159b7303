"""The load of the tests that kill: it distinguishes requests that hang from those of a machine that is slow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from tests.contract.proxy.stand import SECONDS, Stand
from tests.system import proxy_load
from tests.system.proxy_load import Load, Tally

Answer = Callable[[int], Awaitable[web.StreamResponse | None]]
RATES = {"busy": 200.0}


def whole(number: int) -> web.Response:
    return web.Response(text="".join(f"data: {number * 10 + step}\n\n" for step in range(proxy_load.PIECES)))


@asynccontextmanager
async def loaded(answer: Answer) -> AsyncIterator[tuple[Load, asyncio.Task[None]]]:
    """A load before a server that answers its n-th request by `answer`, or as it should where that returns None.

    What asks the model itself has the number 0.
    """

    async def serve(request: web.BaseRequest) -> web.StreamResponse:
        number = json.loads(await request.read() or "{}").get("number", 0)
        return await answer(number) or whole(number)

    runner = web.ServerRunner(web.Server(serve, handler_cancellation=True, access_log=None), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    load = Load(url, RATES, url)
    running = asyncio.create_task(load._run())
    try:
        yield load, running
    finally:
        load.end()
        await running
        await runner.cleanup()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own answers alone are the clock, and come as fast as they can."""
    monkeypatch.setattr(proxy_load, "HANGS_SECONDS", 0.0)
    monkeypatch.setattr(proxy_load, "LOOK_SECONDS", 0.0)


async def ended(load: Load, running: asyncio.Task[None], *, after: int) -> Tally:
    await Stand.until(lambda: load.tally.ends >= after)
    load.end()
    await running
    return load.tally


async def test_request_that_is_never_answered_hangs() -> None:
    async def answer(number: int) -> None:
        if number == 3:
            await asyncio.Event().wait()

    async with loaded(answer) as (load, running):
        tally = await ended(load, running, after=20)
        assert [one.split(",")[0] for one in tally.hung] == ["busy 3"]
        assert tally.whole["busy"] == tally.ends - 1


async def test_request_that_is_refused_without_an_end_hangs() -> None:
    async def answer(number: int) -> web.StreamResponse | None:
        error = {"error": {"code": "wake_failed"}}
        return web.json_response(error, status=503, headers={"Retry-After": "0.01"}) if number == 3 else None

    async with loaded(answer) as (load, running):
        tally = await ended(load, running, after=20)
        assert tally.hung == ["busy 3, after 503 wake_failed"]
        assert tally.repeats["busy", "503 wake_failed"] > 1


async def test_requests_of_a_machine_that_is_behind_do_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers one at a time, and fewer than it is asked for; what it is spared is counted."""
    monkeypatch.setattr(proxy_load, "MOST_SECONDS", 0.1)
    one = asyncio.Lock()

    async def answer(number: int) -> None:
        async with one:
            await asyncio.sleep(0.02)

    async with loaded(answer) as (load, running):
        await Stand.until(lambda: load.tally.unsent)
        tally = await ended(load, running, after=20)
        assert (tally.hung, tally.wrong) == ([], [])
        assert tally.whole["busy"] == tally.ends


async def test_requests_count_in_the_tally_in_which_they_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of before are complete before anything else is killed, which would be taken for their death."""
    may_end = asyncio.Event()

    async def answer(number: int) -> None:
        if number == 3:
            await may_end.wait()

    async with loaded(answer) as (load, _):
        monkeypatch.setattr(proxy_load, "HANGS_SECONDS", SECONDS)
        await Stand.until(lambda: load.tally.ends >= 20)
        before, after = load.tally, load.begin()
        complete = asyncio.create_task(load._until_complete(before))
        await Stand.until(lambda: after.ends >= 20)
        assert not complete.done()
        may_end.set()
        await complete
        assert (before.open, before.hung, before.whole["busy"]) == ({}, [], before.ends)
