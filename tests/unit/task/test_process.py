"""One process: its end, and a CloseIO or a size of its terminal that comes too early."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from kybernate_shim.errors import Refused
from kybernate_shim.linux.children import Exit
from kybernate_shim.task.process import Process
from kybernate_shim.task.stdio import Stdio, StdioConfig

SILENT = StdioConfig("", "", "", terminal=False)


class RecordedStdio:
    """Notes what is asked of it."""

    def __init__(self, *, drains: bool = True) -> None:
        self.asked: list[str] = []
        self._drains = drains

    def close_stdin(self) -> None:
        self.asked.append("close_stdin")

    def resize(self, width: int, height: int) -> None:
        self.asked.append(f"resize {width} {height}")

    def close(self) -> None:
        self.asked.append("close")

    async def drained(self, timeout: float) -> bool:
        self.asked.append(f"drained {timeout:g}")
        return self._drains


@pytest.mark.parametrize("early", [True, False])
def test_closed_input_is_remembered_until_there_is_one(early: bool) -> None:
    process, stdio = Process("", SILENT), RecordedStdio()
    if early:
        process.close_stdin()
    process.adopt(cast(Stdio, stdio))
    if not early:
        assert stdio.asked == []
        process.close_stdin()
    assert stdio.asked == ["close_stdin"]


def test_size_is_remembered_until_there_is_a_terminal() -> None:
    process, stdio = Process("", SILENT), RecordedStdio()
    process.resize(80, 25)
    process.resize(97, 31)
    process.adopt(cast(Stdio, stdio))
    process.resize(120, 42)
    assert stdio.asked == ["resize 97 31", "resize 120 42"]


def test_everyone_who_waits_learns_the_exit() -> None:
    async def work() -> list[Exit]:
        process = Process("", SILENT, state="running")
        waiting = [asyncio.ensure_future(process.wait()) for _ in range(3)]
        await asyncio.sleep(0)
        process.end(Exit(7, 3, 0))
        return [*await asyncio.gather(*waiting), await process.wait()]

    assert asyncio.run(work()) == [Exit(7, 3, 0)] * 4


def test_process_ends_once() -> None:
    process = Process("", SILENT, state="running")
    process.end(Exit(7, 3, 0))
    with pytest.raises(Refused, match="container"):
        process.end(Exit(7, 4, 0))
    assert process.exit == Exit(7, 3, 0)


def test_process_without_stdio_has_nothing_to_drain_or_release() -> None:
    process = Process("", SILENT)
    assert asyncio.run(process.drain(1))
    process.release()


@pytest.mark.parametrize("drains", [True, False])
def test_drain_tells_whether_all_output_was_taken(drains: bool) -> None:
    process, stdio = Process("", SILENT), RecordedStdio(drains=drains)
    process.adopt(cast(Stdio, stdio))
    assert asyncio.run(process.drain(2)) is drains
    process.release()
    assert stdio.asked == ["drained 2", "close"]
