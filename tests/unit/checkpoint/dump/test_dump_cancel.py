"""A dump that is cancelled, or whose container is killed: what stops it, and what it waits for."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kybernate_shim.checkpoint import (
    bound_sockets,
    dump_plan,
    frozen_state,
    memory_first,
    own_state,
    sockets,
    undumpable,
)
from kybernate_shim.checkpoint import dump as dumping
from kybernate_shim.checkpoint.dump import dump
from kybernate_shim.checkpoint.dump_request import Dumped, DumpRequest
from kybernate_shim.checkpoint.image.manifest import NAME
from kybernate_shim.checkpoint.image.store import read_image
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.linux import threads
from tests.unit.checkpoint.dump.dumping import checkpoint, never
from tests.unit.checkpoint.fake_target import LOG, FakeTarget
from tests.unit.clocks import pass_time


def test_undo_waits_for_a_freeze_that_cannot_be_stopped(target: FakeTarget) -> None:
    """A freeze that ends after the thaw would leave the container frozen forever."""
    freezing, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        freezing.set()
        assert go_on.wait(10)

    async def cancelled_in_the_freeze() -> None:
        target.cgroup.on_freeze = slow
        task = asyncio.ensure_future(checkpoint(target))
        await asyncio.to_thread(freezing.wait, 10)
        task.cancel()
        asyncio.get_running_loop().call_later(0.02, go_on.set)
        await asyncio.wait({task})
        assert task.cancelled()

    asyncio.run(cancelled_in_the_freeze())
    assert target.steps == ["freeze", "thaw"]
    assert not target.cgroup.frozen


def test_cancelled_dump_writes_no_manifest_afterwards(target: FakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill that comes while the image is being finished finds the directory cleared, whatever the thread does."""
    finishing, go_on = threading.Event(), threading.Event()
    finish = frozen_state.finish

    def slow(*arguments: Any) -> Dumped:
        finishing.set()
        assert go_on.wait(10)
        return finish(*arguments)

    async def cancelled_at_the_end() -> None:
        monkeypatch.setattr(frozen_state, "finish", slow)
        target.image.mkdir()
        task = asyncio.ensure_future(checkpoint(target))
        await asyncio.to_thread(finishing.wait, 10)
        task.cancel()
        asyncio.get_running_loop().call_later(0.02, go_on.set)
        await asyncio.wait({task})
        assert task.cancelled()

    asyncio.run(cancelled_at_the_end())
    assert not (target.image / NAME).exists()
    assert not any(path.suffix == ".img" for path in target.image.iterdir())


def test_cancel_comes_too_late_for_a_container_that_is_being_ended(target: FakeTarget) -> None:
    """Neither the deadline nor a cancel may take the image of a container that is gone."""
    killing, go_on = threading.Event(), threading.Event()
    operation = Operation("checkpoint")
    kill = target.cgroup.kill

    def slow() -> None:
        kill()
        killing.set()
        assert go_on.wait(10)

    async def ended() -> Dumped:
        target.cgroup.kill = slow  # type: ignore[method-assign]
        wanted = DumpRequest(target.image, target.work, exit=True, deadline=3600)
        task = asyncio.ensure_future(dump(cast(Any, target), wanted, operation, LOG))
        await asyncio.to_thread(killing.wait, 10)
        assert operation.stoppable == "never"
        await pass_time(3600)
        go_on.set()
        return await task

    assert asyncio.run(ended()).manifest == read_image(target.image).manifest
    assert target.steps == ["freeze", "checkpoint", "kill with an image"]


@pytest.mark.parametrize(("exit", "stoppable"), [(True, "by a kill"), (False, "always")])
def test_only_a_kill_stops_a_dump_in_which_criu_ends_the_container(
    target: FakeTarget, exit: bool, stoppable: str
) -> None:
    operation = Operation("checkpoint")
    seen = []
    writing = target.children.on["checkpoint"]

    def look(argv: Sequence[str]) -> Any:
        seen.append(operation.stoppable)
        return writing(argv)

    target.children.on["checkpoint"] = look
    wanted = DumpRequest(target.image, target.work, exit=exit, tcp="established")
    asyncio.run(dump(cast(Any, target), wanted, operation, LOG))
    assert seen == [stoppable]
    assert operation.stoppable == ("never" if exit else "always")


@pytest.mark.parametrize(("tcp", "finished"), [("established", True), ("close", False)])
def test_dump_of_connections_is_waited_for_by_a_cancel(target: FakeTarget, tcp: Any, finished: bool) -> None:
    """CRIU alone can take back what it has done to them."""
    steps: list[str] = []

    async def story() -> None:
        dumping, go_on = asyncio.Event(), asyncio.Event()

        async def criu(argv: Sequence[str]) -> int:
            try:
                dumping.set()
                await go_on.wait()
                steps.append("finished")
            except asyncio.CancelledError:
                steps.append("killed")
                raise
            return 0

        target.children.on["checkpoint"] = criu
        task = asyncio.ensure_future(checkpoint(target, tcp=tcp))
        await dumping.wait()
        task.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        if finished:
            assert not task.done()
            go_on.set()
        async with asyncio.timeout(10):
            await asyncio.wait({task})
        assert task.cancelled()

    asyncio.run(story())
    assert steps == ["finished" if finished else "killed"]
    assert target.steps == ["freeze", "checkpoint", "thaw"]
    assert not target.image.exists()


def test_dump_of_connections_is_not_waited_for_by_a_kill(target: FakeTarget) -> None:
    operation = Operation("checkpoint")

    async def story() -> None:
        dumping = asyncio.Event()

        async def criu(argv: Sequence[str]) -> int:
            dumping.set()
            return await never(argv)

        target.children.on["checkpoint"] = criu
        wanted = DumpRequest(target.image, target.work, tcp="established")
        task = asyncio.ensure_future(dump(cast(Any, target), wanted, operation, LOG))
        await dumping.wait()
        task.cancel()  # by a client, first
        for _ in range(10):
            await asyncio.sleep(0)
        assert not task.done()
        operation.killed.set()
        await asyncio.wait({task})
        assert task.cancelled()

    asyncio.run(story())
    assert not target.image.exists()


DEADLINES = (1.0, 10.0, 60.0)  # seconds: a busy machine needs longer until it comes to the step
# What looks at files and processes of the container, which may keep it waiting.
LOOKS = (
    (sockets, "container_sockets", {}),
    (undumpable, "require_few_descriptors", {}),
    (undumpable, "look", {}),
    (own_state, "nested_namespaces", {}),
    (bound_sockets, "without_directory", {}),
    (dump_plan, "hook_mounts", {}),
    (dump_plan, "wanted", {}),
    (memory_first, "read_ahead", {"rootfs_diff": True}),
    (dumping, "chosen_settings", {}),
    (frozen_state, "_write_rootfs_diff", {"rootfs_diff": True}),
    (frozen_state, "make_restorable", {}),
)


@pytest.mark.parametrize(("module", "name", "request_"), LOOKS, ids=[name for _, name, _ in LOOKS])
def test_dump_ends_at_its_deadline_whatever_it_waits_for(
    target: FakeTarget, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, request_: dict[str, Any]
) -> None:
    monkeypatch.setattr(threads, "PATIENCE_SECONDS", 0.01)
    reading, writing = os.pipe()
    standing, ended, more = threading.Event(), threading.Event(), []

    def stand(*_: Any, **__: Any) -> None:
        standing.set()
        try:
            os.read(reading, 1)  # as in a filesystem whose server does not answer
            more.append("what would change the image of another operation")
        finally:
            ended.set()

    async def story() -> None:
        monkeypatch.setattr(memory_first, "find_overlay", lambda rootfs: SimpleNamespace(upper=target.image.parent))
        monkeypatch.setattr(module, name, stand)
        for deadline in DEADLINES:
            task = asyncio.ensure_future(checkpoint(target, deadline=deadline, **request_))
            await asyncio.wait({task}, timeout=deadline + 60)
            assert task.done()
            assert isinstance(task.exception(), TimeoutError)
            if standing.is_set():
                break

    asyncio.run(story())
    os.write(writing, b"x")
    assert standing.is_set()
    assert ended.wait(10)
    assert (more, target.cgroup.frozen) == ([], False)
    for fd in (reading, writing):
        os.close(fd)
