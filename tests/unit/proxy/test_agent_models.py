"""The agent's words, made into phases of models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from kybernate.client.asynchronous import AsyncAgent
from kybernate.messages import agent_pb2 as wire
from kybernate.proxy.agent_models import AgentModels, is_of, phase_of
from kybernate.proxy.holding import Phase
from kybernate.proxy.models import SuspendFailed, WakeFailed
from kybernate.proxy.settings import Model
from tests.fakes.agent import FakeAgent

QWEN = Model("qwen", "http://h", container="ai/qwen-0")


def container(gpu: str = "attached", state: str = "running", **more: object) -> wire.Container:
    names = {"id": "c1", "namespace": "k8s.io", "title": "ai/qwen-0/server", "pod_namespace": "ai", "pod": "qwen-0"}
    return wire.Container(**names, state=state.upper(), gpu=gpu.upper() or "NO_GPU", **more)


@pytest.mark.parametrize(
    ("gpu", "state", "phase"),
    [
        ("attached", "running", Phase.AWAKE), ("", "running", Phase.AWAKE), ("suspended", "running", Phase.ASLEEP),
        ("suspending", "running", Phase.SUSPENDING), ("resuming", "running", Phase.WAKING),
        ("checkpointing", "running", Phase.AWAKE), ("suspended", "paused", Phase.ASLEEP), ("", "stopped", Phase.ABSENT),
        ("stuck", "running", Phase.ASLEEP), ("parking", "running", Phase.ASLEEP), ("other", "running", Phase.AWAKE),
        ("", "created", Phase.ABSENT),
    ],
)  # fmt: skip
def test_phase_is_that_of_the_container(gpu: str, state: str, phase: Phase) -> None:
    assert phase_of([container(gpu, state)]) == phase


def test_newest_container_counts() -> None:
    old, new = container("suspended"), container("attached")
    new.started.seconds = 5
    assert phase_of([new, old]) == Phase.AWAKE
    assert phase_of([]) == Phase.ABSENT


def test_container_is_named_by_id_title_or_pod() -> None:
    for name in ("c1", "ai/qwen-0/server", "ai/qwen-0", "qwen-0"):
        assert is_of(container(), Model("m", "http://h", container=name))
    assert not is_of(container(), Model("m", "http://h", container="qwen"))
    assert not is_of(container(), Model("m", "http://h", container="c1", namespace="default"))
    assert not is_of(wire.Container(id="c2", pod_namespace="ai"), Model("m", "http://h", container="ai/"))


def change(one: wire.Container, *, removed: bool = False) -> wire.Change:
    return wire.Change(container=one, removed=removed)


@asynccontextmanager
async def models_of(socket: Path, *changes: wire.Change) -> AsyncIterator[AgentModels]:
    """The models of an agent whose snapshot has a suspended container, to which these changes happen."""
    fake = FakeAgent(socket)
    begin, end = wire.BOOKMARK_SNAPSHOT_BEGIN, wire.BOOKMARK_SNAPSHOT_END
    fake.changes = [wire.Change(bookmark=begin), change(container("suspended")), wire.Change(bookmark=end), *changes]
    try:
        async with AsyncAgent(str(fake.socket)) as agent:
            yield AgentModels(agent, [QWEN])
    finally:
        fake.stop()


def test_watch_says_each_phase_once(tmp_path: Path) -> None:
    changes = (
        change(container("suspended", operation="resume")),
        change(container("attached")),
        change(container("attached", sandbox=True, state="stopped")),
        change(container("attached"), removed=True),
    )

    async def watched() -> list[tuple[str, Phase]]:
        async with models_of(tmp_path / "agent.sock", *changes) as models:
            found = []
            async for one in models.watch():
                found.append(one)
                if len(found) == 3:
                    break
            return found

    assert asyncio.run(watched()) == [("qwen", Phase.ASLEEP), ("qwen", Phase.AWAKE), ("qwen", Phase.ABSENT)]


def test_watch_that_is_begun_again_says_all_phases_again(tmp_path: Path) -> None:
    """The engine may not have heeded one of them, in the middle of a suspend that has failed with the agent's end."""

    async def watched() -> list[tuple[str, Phase]]:
        async with models_of(tmp_path / "agent.sock") as models:
            found = []
            for _ in range(2):
                async with aclosing(models.watch()) as phases:
                    found.append(await anext(phases))
            return found

    assert asyncio.run(watched()) == [("qwen", Phase.ASLEEP)] * 2


def test_wake_and_suspend_are_operations_of_the_agent(tmp_path: Path) -> None:
    async def asked() -> list[str]:
        fake = FakeAgent(tmp_path / "agent.sock")
        fake.script = lambda id: [wire.Operation(id=id, verb="resume", state=wire.SUCCEEDED)]
        try:
            async with AsyncAgent(str(fake.socket)) as agent:
                models = AgentModels(agent, [QWEN])
                await models.wake(QWEN)
                await models.suspend(QWEN, unless_used=True)
                names = [f"{type(one).__name__} {one.name}" for one in fake.requests if hasattr(one, "name")]
                error = wire.Error(type="NoRoom", message="no room on the GPU")
                fake.script = lambda id: [wire.Operation(id=id, verb="resume", state=wire.FAILED, error=error)]
                with pytest.raises(WakeFailed, match="no room on the GPU"):
                    await models.wake(QWEN)
                with pytest.raises(SuspendFailed, match="no room on the GPU"):
                    await models.suspend(QWEN, unless_used=False)
                return names
        finally:
            fake.stop()

    assert asyncio.run(asked()) == ["WakeRequest ai/qwen-0", "SleepRequest ai/qwen-0"]


def test_wake_waits_for_an_agent_that_is_started_again(tmp_path: Path) -> None:
    async def woken() -> list[str]:
        fake = FakeAgent(tmp_path / "agent.sock")
        fake.script = lambda id: [wire.Operation(id=id, verb="wake", state=wire.SUCCEEDED)]
        fake.stop()
        async with AsyncAgent(str(fake.socket)) as agent:
            wake = asyncio.ensure_future(AgentModels(agent, [QWEN]).wake(QWEN))
            tries = 0
            while tries < 3:
                await asyncio.sleep(0.05)
                tries += 1
            assert not wake.done()
            fake.start()
            try:
                await wake
                return [one.options.idempotency_key for one in fake.requests]
            finally:
                fake.stop()

    (key,) = asyncio.run(woken())
    assert key


def test_model_that_is_gone_is_told_from_one_that_does_not_wake(tmp_path: Path) -> None:
    async def failed() -> WakeFailed:
        fake = FakeAgent(tmp_path / "agent.sock")
        fake.failure = grpc.StatusCode.NOT_FOUND, wire.Error(type="Missing", message="no such container")
        try:
            async with AsyncAgent(str(fake.socket)) as agent:
                with pytest.raises(WakeFailed) as raised:
                    await AgentModels(agent, [QWEN]).wake(QWEN)
                return raised.value
        finally:
            fake.stop()

    assert asyncio.run(failed()).absent


def test_model_that_ends_while_it_is_to_wake_is_asked_for_again(tmp_path: Path) -> None:
    """The first operation is one of the container that has ended; the second one makes it of its image."""
    missing = wire.Error(type="Missing", message="it has ended")

    async def keys() -> list[str]:
        fake = FakeAgent(tmp_path / "agent.sock")
        answers = [wire.Operation(state=wire.FAILED, error=missing), wire.Operation(state=wire.SUCCEEDED)]

        def script(id: str) -> list[wire.Operation]:
            answer = answers.pop(0)
            answer.id = id
            return [answer]

        fake.script = script
        try:
            async with AsyncAgent(str(fake.socket)) as agent:
                await AgentModels(agent, [QWEN]).wake(QWEN)
                return [one.options.idempotency_key for one in fake.requests]
        finally:
            fake.stop()

    first, second = asyncio.run(keys())
    assert first != second


def test_use_by_others_or_on_a_gpu_keeps_a_model_awake(tmp_path: Path) -> None:
    async def asked() -> list[bool]:
        fake = FakeAgent(tmp_path / "agent.sock")
        fake.script = lambda id: [wire.Operation(id=id, verb="sleep", state=wire.SUCCEEDED)]
        fake.use.mark = 7
        try:
            async with AsyncAgent(str(fake.socket)) as agent:
                models = AgentModels(agent, [QWEN])
                found = [await models.report(QWEN, 2), await models.report(QWEN, 2)]
                fake.use.mark = 8  # its processes have computed
                found.append(await models.report(QWEN, 0))
                fake.use.in_flight = 1  # another proxy's
                found.append(await models.report(QWEN, 0))
                with pytest.raises(SuspendFailed) as raised:
                    await models.suspend(QWEN, unless_used=True)
                found.append(raised.value.used)
                assert not [one for one in fake.requests if isinstance(one, wire.SleepRequest)]
                await models.suspend(QWEN, unless_used=False)
                reports = [one for one in fake.requests if isinstance(one, wire.ReportActivityRequest)]
                assert [one.in_flight for one in reports] == [2, 2, 0, 0, 0, 0]
                assert {one.reporter for one in reports} == {models.name}
                return found
        finally:
            fake.stop()

    assert asyncio.run(asked()) == [False, False, True, True, True]
