"""A container that containerd has connected to its pod's daemon without executing the shim for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog

from kybernate_shim.errors import Invalid
from kybernate_shim.messages import task_pb2 as wire
from kybernate_shim.oci.bundle import Bundle
from kybernate_shim.task import service
from kybernate_shim.task.service import TaskService


def test_create_completes_the_bundle_and_leaves_no_records_when_it_fails(tmp_path: Path) -> None:
    first, bundle = tmp_path / "pod", tmp_path / "app"
    for directory in (first, bundle):
        directory.mkdir()
    (first / "shim-binary-path").write_text("/opt/shim")
    (bundle / "sandbox").write_text("pod")
    (bundle / "config.json").write_text("{")
    nothing = cast(Any, None)
    tasks = TaskService("ns", nothing, lambda *_: None, structlog.get_logger(), nothing, "unix:///s/1")
    with pytest.raises(Invalid, match=r"JSON|config"):
        asyncio.run(tasks.create(wire.CreateTaskRequest(id="app", bundle=str(bundle))))
    assert (bundle / "address").read_text() == "unix:///s/1"
    assert (bundle / "shim-binary-path").read_text() == "/opt/shim"
    assert Bundle(first).connected() == {}


def test_delete_waits_for_the_create_that_its_client_has_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """containerd calls it then, and forgets the container with the answer."""
    bundle = tmp_path / "app"
    bundle.mkdir()
    nothing = cast(Any, None)
    events: list[str] = []
    tasks = TaskService("ns", nothing, lambda topic, _: events.append(topic), structlog.get_logger(), nothing, "/s/1")
    begun, goes_on = asyncio.Event(), asyncio.Event()
    init = SimpleNamespace(pid=7, exit=None)

    async def create(*_: object) -> None:
        begun.set()
        await goes_on.wait()
        events.append("created")

    async def delete() -> SimpleNamespace:
        events.append("deleted")
        return init

    async def prepare(*_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(
            image=None, create=create, delete=delete, init=init, bundle=Bundle(bundle), configure=lambda settings: None
        )

    monkeypatch.setattr(service, "prepare", prepare)
    monkeypatch.setattr(tasks, "settings", SimpleNamespace(read=lambda: None))

    async def given_up() -> None:
        creating = asyncio.create_task(tasks.create(wire.CreateTaskRequest(id="app", bundle=str(bundle))))
        await begun.wait()
        deleting = asyncio.create_task(tasks.delete(wire.DeleteRequest(id="app")))
        goes_on.set()
        await asyncio.gather(creating, deleting)

    asyncio.run(given_up())
    assert events == ["created", "deleted", "/tasks/delete"]
    assert not tasks.containers
    assert not tasks.creating
