"""The daemon as a whole, over its socket: what is in its log when containerd is answered."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from google.protobuf.empty_pb2 import Empty

from kybernate_shim import serve
from kybernate_shim.invocation import Invocation
from kybernate_shim.logs import open_log
from kybernate_shim.messages import task_pb2 as wire
from kybernate_shim.serve import Daemon
from kybernate_shim.task.service import SERVICES
from kybernate_shim.ttrpc import Client


@pytest.fixture
def short() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:  # a socket's address has 108 bytes
        yield Path(directory)


def test_daemon_without_containers_ends_by_itself(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """containerd's client may give up between the last Delete and Shutdown, which never comes then."""
    monkeypatch.setattr(serve, "UNWANTED_SECONDS", 0.01)
    log = open_log(short / "log", short / "log", level="info", shim_pid=os.getpid())

    async def lives_as_long_as_its_container() -> None:
        ready = asyncio.Event()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(short / "s"))
            listener.listen()
            daemon = Daemon(Invocation(), short / "s", log)
            daemon._service.containers["one"] = cast(Any, None)
            running = asyncio.create_task(daemon.run(listener, ready.set))
            await ready.wait()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(running), 0.2)
            del daemon._service.containers["one"]
            assert await asyncio.wait_for(running, 20) == 0

    asyncio.run(lives_as_long_as_its_container())
    assert not (short / "s").exists()
    assert "shim.not_used" in (short / "log").read_text()


def test_log_ends_before_shutdown_is_answered(short: Path) -> None:
    """containerd closes the log's reader as soon as it has the answer."""
    os.mkfifo(short / "log")
    reader = os.open(short / "log", os.O_RDONLY | os.O_NONBLOCK)
    log = open_log(short / "log", None, level="info", shim_pid=os.getpid())
    events: list[str] = []

    async def shut_down() -> None:
        ready = asyncio.Event()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(short / "s"))
            listener.listen()
            daemon = asyncio.create_task(Daemon(Invocation(), short / "s", log).run(listener, ready.set))
            await ready.wait()
            client = await Client.connect(str(short / "s"))
            await asyncio.gather(
                *(client.call(SERVICES[1], "Shutdown", wire.ShutdownRequest(), Empty) for _ in range(3))
            )
            events.extend(json.loads(line)["event"] for line in os.read(reader, 1 << 16).splitlines())
            await client.close()
            assert await daemon == 0

    asyncio.run(shut_down())
    os.close(reader)
    assert events == ["shim.started", "shim.ended"]
    assert not (short / "s").exists()
