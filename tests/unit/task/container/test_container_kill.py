"""A SIGKILL ends a container, also where a thaw, the notice of an exit, or the exit itself was lost."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate_shim.linux.cgroup.cgroup import Cgroup
from kybernate_shim.task import ending as subject
from tests.unit.task.container.stories import Tell
from tests.unit.task.runtime import Life


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no look be waited for."""
    monkeypatch.setattr(subject, "LOOKS", (0.0,))
    monkeypatch.setattr(subject, "LATER", 0.001)


@pytest.fixture
def process() -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"]) as one:
        yield one.pid
        one.kill()


def in_freezer(place: Path, state: str, pid: int) -> Cgroup:
    """A cgroup of version 1 with this process, in that state."""
    (place / "freezer.state").write_text(f"{state}\n")
    (place / "cgroup.procs").write_text(f"{pid}\n")
    return Cgroup(1, {"freezer": place})


def with_init(life: Life, pid: int, cgroup: Cgroup) -> None:
    life.container.init.pid = pid
    life.container.cgroup = cgroup
    life.children.claim(pid, life.container.exits.handle_init)


def test_signal_and_thaw_that_were_lost_are_repeated(tell: Tell, tmp_path: Path, process: int) -> None:
    async def story(life: Life) -> None:
        await life.run()
        with_init(life, process, in_freezer(tmp_path, "FREEZING", process))
        await life.container.kill("", 9, all=True)
        await life.container.init.wait()

    life = tell(story)
    assert (tmp_path / "freezer.state").read_text().startswith("THAWED")
    assert life.topics[-1] == "exit c1"
    assert life.told[-1][1].exit_status == 137


def test_exit_that_another_waiter_has_taken_is_published_as_that_of_a_kill(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        await life.container.kill("", 9, all=True)
        await life.container.init.wait()

    life = tell(story)
    assert life.topics[-1] == "exit c1"
    assert life.told[-1][1].exit_status == 137


def test_container_that_an_operation_has_frozen_is_left_to_it(
    tell: Tell, tmp_path: Path, process: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(life: Life) -> None:
        await life.run()
        with_init(life, process, in_freezer(tmp_path, "FROZEN", process))
        looked = asyncio.Event()
        monkeypatch.setattr(type(life.container), "operation", object())
        monkeypatch.setattr(subject, "_described", lambda pid: looked.set())
        await life.container.kill("", 9, all=True)
        await looked.wait()
        assert life.container.init.exit is None

    tell(story)
    assert (tmp_path / "freezer.state").read_text() == "FROZEN\n"


def test_process_that_an_operation_is_still_making_is_not_taken_for_lost(
    tell: Tell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore that fails has no init in the end."""

    async def story(life: Life) -> None:
        await life.run()
        looked = asyncio.Event()
        monkeypatch.setattr(type(life.container), "operation", object())
        monkeypatch.setattr(subject, "_described", lambda pid: looked.set())
        (tmp_path / "cgroup.procs").write_text("1\n")
        life.container.cgroup = Cgroup(1, {"freezer": tmp_path})
        await life.container.kill("", 9, all=True)
        await looked.wait()
        assert life.container.init.exit is None

    tell(story)
