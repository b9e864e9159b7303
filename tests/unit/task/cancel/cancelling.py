"""A shim whose checkpoint can be held at a step, and calls of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog

from kybernate_shim.checkpoint.dump import DumpRequest
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.linux.cgroup.cgroup import Cgroup
from kybernate_shim.live_config import LiveConfig
from kybernate_shim.messages import shim_pb2 as wire
from kybernate_shim.task import operations
from kybernate_shim.task.service import TaskService
from kybernate_shim.task.shim_service import ShimService
from kybernate_shim.trust.audit import ImageRef
from kybernate_shim.ttrpc import Call, RpcError
from kybernate_shim.undo import AsyncUndo
from tests.unit.task.runtime import INIT, Life

OWN = "kybernate.shim.v1.Shim"


@dataclass
class Dumping:
    """A dump in three steps, each of which waits until a test lets it continue: its work, its undo, and its end."""

    steps: list[str] = field(default_factory=list)
    work: asyncio.Event = field(default_factory=asyncio.Event)
    undo: asyncio.Event = field(default_factory=asyncio.Event)
    end: asyncio.Event = field(default_factory=asyncio.Event)
    failure: Exception | None = None  # of the work
    undo_failure: Exception | None = None
    commits: bool = False
    seconds: float = 0

    async def dump(self, target: Any, request: DumpRequest, operation: Operation, *_: Any) -> Any:
        async with operation.within(self.seconds), AsyncUndo() as undo:
            undo.push_async_callback(self._undo)
            self.steps.append("work")
            with operation.step("dump"):
                await self.work.wait()
            if self.failure is not None:
                raise self.failure
            if self.commits:
                operation.commit()
                self.steps.append("committed")
                await self.end.wait()
            undo.pop_all()
        return SimpleNamespace(manifest=SimpleNamespace(bytes=4711, steps=()), digest="sha256:0")

    async def _undo(self) -> None:
        self.steps.append("undo")
        await self.undo.wait()
        if self.undo_failure is not None:
            raise self.undo_failure
        self.steps.append("undone")


class Shim:
    """The service of a daemon with one running container, which is dumped as `dumping` says."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        bundle = directory / "bundle"
        bundle.mkdir()
        self.life = Life(bundle)
        self.dumping = Dumping()
        container = self.life.container
        container.config = replace(container.config, audit_log=None, work_root=directory / "work")
        container.init.pid = INIT
        container.init.move("start")
        cgroup = directory / "cgroup"
        cgroup.mkdir()
        (cgroup / "cgroup.procs").write_text(f"{INIT}\n")
        (cgroup / "cgroup.kill").write_text("")
        container.cgroup = Cgroup(2, {"": cgroup})
        self.killed = cgroup / "cgroup.kill"
        self.container = container
        monkeypatch.setattr(operations, "dump", lambda *arguments: self.dumping.dump(*arguments))
        monkeypatch.setattr(operations, "image_ref", lambda path, *_: ImageRef(str(path), "", "sha256:0"))
        tasks = TaskService("ns", self.life.children, lambda *_: None, structlog.get_logger(), cast(Any, None))
        tasks.settings = LiveConfig(structlog.get_logger(), directory / "shim.toml")
        container.configure = lambda node: None  # type: ignore[method-assign]  # the node's file is not this test's
        tasks.containers["c1"] = container
        self.tasks = tasks
        self._methods = ShimService(tasks).methods()

    def call(self, method: str, request: Any) -> asyncio.Task[Any]:
        """Begin a call as the server does; its error is an RpcError."""
        call = Call(OWN, method, {}, None)
        return asyncio.ensure_future(cast(Any, self._methods[method].handle(request, call)))

    def checkpoint(self, operation: str = "x", **fields: Any) -> asyncio.Task[Any]:
        request = wire.CheckpointRequest(id="c1", path="/image", operation=operation, **fields)
        return self.call("Checkpoint", request)

    def cancel(self, operation: str = "x") -> asyncio.Task[Any]:
        return self.call("Cancel", wire.CancelRequest(id="c1", operation=operation))

    async def status(self) -> wire.Container:
        reply = await self.call("Status", wire.StatusRequest(id="c1"))
        return cast(wire.Container, reply.containers[0])

    async def until(self, step: str) -> None:
        await eventually(lambda: step in self.dumping.steps)


async def eventually(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110  # several tasks and threads lead to it
            await asyncio.sleep(0.001)


async def failure_of(call: Awaitable[Any]) -> RpcError:
    with pytest.raises(RpcError) as failed:
        await call
    return failed.value


Tell = Callable[[Callable[[Shim], Awaitable[Any]]], None]


async def assert_free(shim: Shim) -> None:
    """The container takes a second checkpoint, which succeeds."""
    assert shim.container.gpu.state == "attached"
    assert not shim.container.lock.locked()
    shim.dumping = Dumping()
    shim.dumping.work.set()
    assert (await shim.checkpoint("second")).bytes == 4711
