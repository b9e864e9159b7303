"""What the agent is told of use, and models that something else uses, over both data planes; shares of two proxies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp

from kybernate.agent.access.caller import CALLER, Caller, Role
from kybernate.agent.inventory import shares as agent_shares
from kybernate.agent.service.activity import Activity
from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Missing
from kybernate.proxy.holding import Phase
from kybernate.proxy.shares import Shares
from kybernate_shim.logs import Log
from tests.contract.proxy.conftest import Standing
from tests.contract.proxy.stand import CHAT, Stand, standing


async def test_stream_is_reported_while_it_lasts_and_its_end_as_well(standing_proxy: Standing) -> None:
    async with standing_proxy(phase=Phase.AWAKE, more="\nroutes: [{path: /stream, to: qwen}, {}]") as stand:
        async with stand.client.get(f"{stand.url}/stream") as answer:
            await answer.content.readline()
            await stand.until(lambda: ("qwen", 1) in stand.models.reports, "the stream is reported")
            stand.upstream.may_end.set()
            await answer.read()
        await stand.until(lambda: stand.models.reports[-1] == ("qwen", 0), "its end is reported")


async def test_model_that_computes_is_not_suspended_when_its_requests_are_few(standing_proxy: Standing) -> None:
    async with standing_proxy(phase=Phase.AWAKE, model="idle: 50ms") as stand:
        stand.models.used = True
        await stand.until(lambda: stand.models.calls["suspend qwen"] > 1, "it was tried, and given up")
        assert stand.models.phases["qwen"] == Phase.AWAKE
        assert (await stand.chat()).status == 200
        assert 'outcome="used"' in await stand.metrics()
        stand.models.used = False
        await stand.until(lambda: stand.held().phase == Phase.ASLEEP, "nothing uses it any more")


async def test_model_that_is_gone_is_woken_by_its_image(standing_proxy: Standing) -> None:
    """The agent restores one that is parked, or whose image an operator has labelled."""
    async with standing_proxy() as stand:
        stand.models.change("qwen", Phase.ABSENT)
        await stand.until(lambda: stand.held().phase == Phase.ABSENT)
        stand.models.phases["qwen"] = Phase.ASLEEP  # what the agent knows of it
        assert (await stand.chat()).status == 200
        assert stand.models.calls["wake qwen"] == 1


# ---- two proxies


class OneAgent:
    """The agent's service, without a network: each proxy has a call of its own, which a test can break."""

    def __init__(self) -> None:
        inventory = SimpleNamespace(find=self._find)
        self.service = Activity(cast("Any", inventory))

    @staticmethod
    def _find(name: str, namespace: str) -> Any:
        raise Missing(f"no container {name}")

    async def share(self, requests: AsyncIterator[wire.ConcurrencyRequest]) -> AsyncIterator[wire.ConcurrencyShare]:
        CALLER.set(Caller(Role.PROXY, uid=0))
        async for share in self.service.ShareConcurrency(requests, None):
            yield share


@asynccontextmanager
async def two_proxies(tmp_path: Path, plane: str, limit: int) -> AsyncIterator[tuple[Stand, Stand, OneAgent]]:
    """Two proxies before one upstream, which both think has the first one's."""
    agent = OneAgent()
    async with AsyncExitStack() as stack:
        stands = []
        for name in ("a", "b"):
            stand = await stack.enter_async_context(
                standing(plane=plane, place=tmp_path, phase=Phase.AWAKE, model=f"concurrency: {limit}")
            )
            shares = Shares(stand.service.engine, agent, name, Log(lambda line: None, 0, {}))
            stand.service.watching.append(asyncio.create_task(shares.run()))
            stands.append(stand)
            held = stand.held()
            await stand.until(lambda held=held: held.closed or held.granted, "HAProxy passes no more than its share")
        expiring = asyncio.create_task(agent.service.expire())
        try:
            yield stands[0], stands[1], agent
        finally:
            expiring.cancel()


async def test_concurrency_holds_over_two_proxies(plane: str, tmp_path: Path) -> None:
    async with two_proxies(tmp_path, plane, 3) as (one, other, _):
        running: list[int] = []

        def begun(stand: Stand) -> list[asyncio.Task[aiohttp.ClientResponse]]:
            return [asyncio.create_task(ask(stand)) for _ in range(20)]

        async def ask(stand: Stand) -> aiohttp.ClientResponse:
            async with stand.client.post(f"{stand.url}/wait", json=CHAT) as answer:
                await answer.read()
                return answer

        tasks = [*begun(one), *begun(other)]
        for stand in (one, other):
            await stand.until(lambda stand=stand: stand.upstream.running > 0, "each has a share")
        running.append(one.upstream.running + other.upstream.running)
        for stand in (one, other):
            stand.upstream.may_end.set()
        answers = await asyncio.gather(*tasks)
        assert {answer.status for answer in answers} == {200}
        assert running[0] <= 3
        assert one.upstream.most + other.upstream.most <= 4  # each had all of it at some time, never both


async def test_share_of_a_proxy_that_is_gone_ends(plane: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(agent_shares, "LASTS_SECONDS", 1.0)
    monkeypatch.setattr("kybernate.proxy.shares.LASTS_SECONDS", 1.0)
    monkeypatch.setattr("kybernate.proxy.shares.RENEW_SECONDS", 0.3)
    async with two_proxies(tmp_path, plane, 1) as (one, other, _):
        held = asyncio.create_task(other.client.post(f"{other.url}/wait", json=CHAT))
        await other.until(lambda: other.upstream.running == 1, "the other has the one share")
        waiting = asyncio.create_task(one.chat())
        await one.until(lambda: len(one.held().waiting) == 1, "it waits")
        for task in other.service.watching[-1:]:  # as if it were killed: it says nothing more
            task.cancel()
        assert (await waiting).status == 200
        held.cancel()


async def test_model_that_something_else_suspends_wakes_for_requests_of_before_and_after(
    standing_proxy: Standing,
) -> None:
    """Another proxy, or an operator: the watch says that it is being suspended before it says that it sleeps."""
    async with standing_proxy(phase=Phase.AWAKE) as stand:
        stand.models.change("qwen", Phase.SUSPENDING)
        await stand.until(lambda: stand.held().phase == Phase.SUSPENDING)
        waits = asyncio.create_task(stand.chat())
        await stand.until(lambda: len(stand.held().waiting) == 1)
        stand.models.change("qwen", Phase.ASLEEP)
        assert (await waits).status == 200
        assert stand.models.calls["wake qwen"] == 1
        stand.models.change("qwen", Phase.SUSPENDING)
        stand.models.change("qwen", Phase.AWAKE)  # it failed
        await stand.until(stand.models.all_said)
        assert (await stand.chat()).status == 200
        assert stand.models.calls["wake qwen"] == 1
