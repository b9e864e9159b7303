"""Operations of the node agent on real containers: an agent that is stopped in between is followed by another one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kybernate.agent.journal import Journal
from kybernate.agent.operations.engine import Engine
from kybernate.agent.operations.execute import NodeExecutor
from kybernate.agent.operations.store import SCHEMA
from kybernate.node.containerd import DEFAULT_ADDRESS
from kybernate.verbs.checkpoint import Checkpoint
from kybernate.verbs.model import Operation, State, Submission
from kybernate.verbs.node import Node
from kybernate.verbs.restore import Restore
from kybernate.verbs.verify import Verify
from kybernate_shim.linux.process import boot_id
from tests.system.ctr import Ctr, eventually
from tests.system.test_checkpoint import Counter, counting

DEADLINE = 120.0


class NoEvents:
    async def record(self, type: str, level: str, message: str, **fields: str) -> object:
        return None


@pytest.fixture
def counter(tmp_path: Path) -> Iterator[Counter]:
    with counting(Ctr(), tmp_path / "log") as one:
        one.goes_on()
        yield one


@asynccontextmanager
async def agent(directory: Path) -> AsyncIterator[Engine]:
    """Run an agent's engine until the block ends, which is all that its shims see of its death."""
    journal = Journal(directory / "journal", SCHEMA)
    node = Node(DEFAULT_ADDRESS, boot=boot_id())
    engine = Engine(journal, NodeExecutor(node), events=NoEvents(), boot=node.boot)
    running = asyncio.create_task(engine.run())
    try:
        yield engine
    finally:
        running.cancel()
        await asyncio.wait({running})
        journal.close()


async def ended(engine: Engine, id: str) -> Operation:
    async with asyncio.timeout(DEADLINE):
        return [one async for one in engine.watch(id)][-1]


def test_checkpoint_outlives_the_agent_and_the_next_one_restores_it(counter: Counter, tmp_path: Path) -> None:
    new, log = f"{counter.id}-new", tmp_path / "log2"
    ask = Submission(Checkpoint(counter.id, path=str(tmp_path / "image"), exit=True), key="one")

    async def begin() -> str:
        async with agent(tmp_path) as engine:
            one = await engine.submit(ask)
            async for seen in engine.watch(one.id):
                if seen.state != State.PENDING:
                    return one.id
        raise AssertionError("it never began")

    async def end(id: str) -> Operation:
        async with agent(tmp_path) as engine:
            assert (await engine.submit(ask)).id == id
            assert (await ended(engine, id)).state == State.SUCCEEDED
            verify = await engine.submit(Submission(Verify(str(tmp_path / "image"))))
            assert (await ended(engine, verify.id)).state == State.SUCCEEDED
            restore = await engine.submit(Submission(Restore(str(tmp_path / "image"), name=new, log_path=str(log))))
            return await ended(engine, restore.id)

    try:
        restored = asyncio.run(end(asyncio.run(begin())))
        assert restored.state == State.SUCCEEDED, restored.fault
        last = counter.lines[-1]
        assert Counter(counter.ctr, new, log).goes_on(after=last) == last + 1
    finally:
        counter.ctr.remove(new)
        counter.ctr("snapshot", "rm", new, status=None)


def test_cancelled_checkpoint_leaves_the_container_running(counter: Counter, tmp_path: Path) -> None:
    async def work() -> Operation:
        async with agent(tmp_path) as engine:
            one = await engine.submit(Submission(Checkpoint(counter.id, path=str(tmp_path / "image"))))
            async for seen in engine.watch(one.id):
                if seen.progress is not None and seen.progress.step:
                    break
            await engine.cancel(one.id)
            return await ended(engine, one.id)

    end = asyncio.run(work())
    assert end.state in (State.CANCELLED, State.SUCCEEDED), end.fault  # it may be too late to stop it
    assert (tmp_path / "image").exists() == (end.state == State.SUCCEEDED)
    before = counter.lines[-1]
    eventually(lambda: counter.lines[-1] > before)


def test_operation_on_a_container_that_ended_fails_and_says_why(counter: Counter, tmp_path: Path) -> None:
    async def work() -> Operation:
        async with agent(tmp_path) as engine:
            await engine.drain()
        async with agent(tmp_path) as engine:
            first = await engine.submit(Submission(Checkpoint(counter.id, path=str(tmp_path / "one"), exit=True)))
            second = await engine.submit(Submission(Checkpoint(counter.id, path=str(tmp_path / "two"))))
            assert (await ended(engine, first.id)).state == State.SUCCEEDED
            return await ended(engine, second.id)

    end = asyncio.run(work())
    assert end.state == State.FAILED
    assert end.fault is not None
    assert "counter" in end.fault.message or counter.id in end.fault.message
