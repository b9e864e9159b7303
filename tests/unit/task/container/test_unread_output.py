"""An exit waits for a client that has yet to read what the process wrote, and for no other client."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kybernate_shim.config import Deadlines
from kybernate_shim.errors import Missing
from kybernate_shim.task import stdio as subject
from kybernate_shim.task.oom_reports import OomReports
from kybernate_shim.task.process import Process
from kybernate_shim.task.stdio import StdioConfig
from tests.unit.task.container.stories import Tell
from tests.unit.task.runtime import EXEC, INIT, Life, settled


@pytest.fixture
def client(tmp_path: Path) -> Iterator[int]:
    """The reading end of a FIFO `out`, which does not block."""
    os.mkfifo(tmp_path / "out")
    fd = os.open(tmp_path / "out", os.O_RDONLY | os.O_NONBLOCK)
    yield fd
    os.close(fd)


async def run_exec(life: Life, output: Path) -> None:
    """Run an exec that writes "said" to `output`."""
    life.container.execs.add("e1", StdioConfig("", str(output), "", terminal=False), b"{}")

    def say() -> None:
        stdio = life.container.execs.find("e1").stdio
        assert stdio is not None
        os.write(stdio.fds[1], b"said")

    life.runtime.on["exec"] = say
    await life.container.execs.start("e1")


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110  # the FIFO has no event for this
            await asyncio.sleep(0.001)


def in_fifo(life: Life) -> bool:
    """Return whether the output has come from the process's pipe into the client's FIFO."""
    stdio = life.container.execs.find("e1").stdio
    return stdio is not None and stdio._outputs[0].ended.is_set()


@pytest.mark.parametrize("copied", [False, True])
def test_exit_waits_for_what_the_client_has_not_read(
    tell: Tell, tmp_path: Path, client: int, monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    monkeypatch.setattr(subject, "READ_SECONDS", 60.0)

    async def story(life: Life) -> None:
        await life.run()
        await run_exec(life, tmp_path / "out")
        if copied:
            await until(lambda: in_fifo(life))
        life.end(EXEC)
        life.end(INIT)
        await until(lambda: in_fifo(life))
        await settled()
        assert "exit e1" not in life.topics
        with pytest.raises(
            Missing, match=r"finished|not running|no such process|not found|does not exist|No such file"
        ):
            await life.container.kill("e1", 9, all=False)
        assert os.read(client, 99) == b"said"
        await until(lambda: "exit c1" in life.topics)

    assert tell(story).topics[-2:] == ["exit e1", "exit c1"]


def test_exit_waits_for_no_client_that_does_not_read(
    tell: Tell, tmp_path: Path, client: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "READ_SECONDS", 0.01)

    async def story(life: Life) -> None:
        await life.run()
        await run_exec(life, tmp_path / "out")
        life.end(EXEC)
        await until(lambda: "exit e1" in life.topics)

    tell(story)
    assert os.read(client, 99) == b"said"


@pytest.mark.parametrize("copied", [False, True])
def test_exit_waits_for_no_client_that_has_left(
    tell: Tell, tmp_path: Path, client: int, monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    """What it has not read stays in the FIFO, for the next one."""
    monkeypatch.setattr(subject, "READ_SECONDS", 60.0)

    async def story(life: Life) -> None:
        await life.run()
        await run_exec(life, tmp_path / "out")
        if copied:
            await until(lambda: in_fifo(life))
        os.close(client)
        life.end(EXEC)
        assert life.topics[-1] == "exit e1"
        await until(lambda: in_fifo(life))
        os.dup2(again := os.open(tmp_path / "out", os.O_RDONLY | os.O_NONBLOCK), client)
        os.close(again) if again != client else None
        assert os.read(client, 99) == b"said"

    tell(story)


def test_output_that_was_left_unread_long_ago_holds_no_exit(
    tell: Tell, tmp_path: Path, client: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(life: Life) -> None:
        await life.run()
        await run_exec(life, tmp_path / "out")
        await until(lambda: in_fifo(life))
        monkeypatch.setattr(subject, "READ_SECONDS", 0.0)
        life.end(EXEC)
        assert life.topics[-1] == "exit e1"

    tell(story)


def test_file_holds_no_exit(tell: Tell, tmp_path: Path) -> None:
    (tmp_path / "log").touch()

    async def story(life: Life) -> None:
        await life.run()
        await run_exec(life, tmp_path / "log")
        life.end(EXEC)
        assert life.topics[-1] == "exit e1"

    tell(story)


def test_exit_comes_where_no_descriptor_is_left_to_look_for_a_client(
    tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_descriptors(_: object) -> bool:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Process, "reader_is_behind", property(out_of_descriptors))
    monkeypatch.setattr(OomReports, "report", out_of_descriptors)

    async def story(life: Life) -> None:
        await life.run()
        life.end(INIT)
        assert (await life.container.init.wait()) is not None

    assert tell(story).topics[-1] == "exit c1"


def test_drain_without_a_deadline_waits_for_the_end(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float | None] = []

    async def drain(_: Process, seconds: float | None) -> bool:
        given.append(seconds)
        return True

    monkeypatch.setattr(Process, "drain", drain)

    async def story(life: Life) -> None:
        await life.run()
        life.end(INIT)
        for seconds in (0.0, 7.0):
            life.container.config = replace(life.container.config, deadlines=Deadlines(io_drain=seconds))
            await life.container.drain(life.container.init)

    tell(story)
    assert given == [None, 7.0]
