"""When a release ends although processes keep what they have inherited, and whom it does not reach."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog

from kybernate_shim.checkpoint.gpu import inherited
from kybernate_shim.checkpoint.gpu.inherited import Inherited, InheritedRelease
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.errors import Refused
from kybernate_shim.gpu.inheritors import Inheritors
from kybernate_shim.linux import nvidia_devices
from kybernate_shim.linux.nvidia_devices import DeviceFiles


@dataclass
class FakeInherited:
    """Has these processes, of which none holds anything whenever it is asked."""

    members: Sequence[int] = ()
    inheritors: Inheritors = field(default_factory=Inheritors)
    target: Any = field(default_factory=lambda: type("Target", (), {"id": "c"}))

    async def holding(self) -> list[DeviceFiles]:
        return []

    def pids(self) -> list[int]:
        return list(self.members)


def release(fake: FakeInherited) -> InheritedRelease:
    return InheritedRelease(cast(Inherited, fake), cast(Any, None))


def test_processes_that_are_only_there_when_all_are_frozen_do_not_keep_it_up_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(inherited.time, "monotonic", lambda: now)
    one = release(FakeInherited())
    for _ in range(3):
        asyncio.run(one.run(Operation("checkpoint")))
        now += inherited.SECONDS / 3
    now += 1
    with pytest.raises(Refused, match="keep appearing; container c continues as before"):
        asyncio.run(one.run(Operation("checkpoint")))


@pytest.mark.parametrize(("members", "reached"), [([os.getpid()], [os.getpid()]), ([], [])])
def test_process_that_is_none_of_the_container_is_not_reached(members: list[int], reached: list[int]) -> None:
    """It has got the pid of one that was when it was looked at."""
    jobs = release(FakeInherited(members))._jobs([DeviceFiles(os.getpid(), (), frozenset({3}))])
    assert [job.pid for job in jobs] == reached


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Inherited]:
    """Of a container with a process that keeps every look at it waiting."""
    waiting = threading.Event()
    monkeypatch.setattr(inherited, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(nvidia_devices, "look_all", lambda *_: waiting.wait(30) and [])
    target = SimpleNamespace(id="c", cgroup=SimpleNamespace(processes=lambda: [os.getpid()]))
    yield Inherited(cast(Any, target), structlog.get_logger())
    waiting.set()


def test_process_that_keeps_a_look_waiting_keeps_no_container_locked(silent: Inherited) -> None:
    with structlog.testing.capture_logs() as logs:
        asyncio.run(silent.observe([]))
    assert [line["event"] for line in logs] == ["device_files.not_examined"]


def test_process_that_keeps_a_look_waiting_keeps_no_container_frozen(silent: Inherited) -> None:
    with pytest.raises(Refused, match=r"examined within 0\.1 s; container c continues as before"):
        asyncio.run(silent.holding())
