"""A container that containerd has connected to its pod's daemon without executing the shim for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
import structlog

from kybernate_shim.errors import Invalid
from kybernate_shim.messages import task_pb2 as wire
from kybernate_shim.oci.bundle import Bundle
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
