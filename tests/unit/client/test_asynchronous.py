"""The client for asyncio does what the blocking one does."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from kybernate.client import Agent, AgentRefused, AsyncAgent, NotFinished, OperationCancelled
from kybernate.messages import agent_pb2 as wire
from tests.fakes.agent import FakeAgent


def test_both_clients_have_the_same_calls() -> None:
    def public(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(member).parameters)
            for name, member in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        }

    assert public(Agent) == public(AsyncAgent)


def test_operation_is_followed_cancelled_and_waited_for(fake: FakeAgent) -> None:
    async def scenario() -> None:
        async with AsyncAgent(str(fake.socket)) as agent:
            operation = await agent.checkpoint("web", "image")
            fake.push(wire.Operation(id=operation.id, state=wire.RUNNING, progress=wire.Progress(step="dump")))
            steps = []
            async for state in operation.follow():
                steps.append(state.progress.step)
                if steps[-1] == "dump":
                    await operation.cancel()
                    break
            with pytest.raises(OperationCancelled):
                await operation.result()
            second = await agent.suspend("web")
            with pytest.raises(NotFinished):
                await second.result(timeout=0.2)
            assert [one.id for one in await agent.operations()] == [second.id, operation.id]
            with pytest.raises(AgentRefused, match="no operation has the id op-9"):
                await agent.operation("op-9")

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_operation_is_followed_over_a_restart_of_the_agent(fake: FakeAgent) -> None:
    async def scenario() -> None:
        async with AsyncAgent(str(fake.socket)) as agent:
            operation = await agent.checkpoint("web")
            fake.stop()
            fake.push(wire.Operation(id=operation.id, state=wire.SUCCEEDED))
            asyncio.get_running_loop().call_later(0.3, fake.start)
            await operation.result(timeout=60)

    asyncio.run(asyncio.wait_for(scenario(), 90))


def test_lists_and_watch_are_streams(fake: FakeAgent) -> None:
    fake.images = [wire.Image(id=str(number)) for number in range(3)]
    fake.changes = [wire.Change(revision=7)]

    async def scenario() -> tuple[list[str], list[int]]:
        async with AsyncAgent(str(fake.socket)) as agent:
            images = [image.id async for image in agent.images(pod="web-0")]
            return images, [change.revision async for change in agent.watch(timeout=0.3)]

    assert asyncio.run(asyncio.wait_for(scenario(), 30)) == (["0", "1", "2"], [7])
