"""The daemon's log: whole lines for what reads them, and never a wait or an error for what writes them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kybernate_shim.logs import LineWriter, Log, open_log


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe2(os.O_NONBLOCK)
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_full_pipe_loses_lines_and_counts_them(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    log = LineWriter(writer)
    for _ in range(40):
        log.write("x" * 4000)
    held = len(os.read(reader, 1 << 20).splitlines())
    log.write("heard again")
    lost, line = os.read(reader, 4096).splitlines()
    assert json.loads(lost) == {"event": "log.lost", "lines": 40 - held}
    assert line == b"heard again"
    log.write("and no more of it")
    assert os.read(reader, 4096) == b"and no more of it\n"


def test_line_that_was_cut_off_does_not_spoil_the_next(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    log = LineWriter(writer)
    log.write("x" * (1 << 20))
    log.write("lost")
    assert set(os.read(reader, 1 << 20)) == {ord("x")}
    log.write("whole")
    end, lost, line = os.read(reader, 4096).splitlines()
    assert (end, json.loads(lost)["lines"], line) == (b"", 2, b"whole")


def test_one_full_destination_does_not_cost_the_other_a_line(pipe: tuple[int, int], tmp_path: Path) -> None:
    _, writer = pipe
    with (tmp_path / "file").open("wb") as file:
        log = LineWriter(writer, file.fileno())
        for number in range(1000):
            log.write(f"{number:04} " + "x" * 200)
    lines = (tmp_path / "file").read_text().splitlines()
    assert [int(line[:4]) for line in lines] == list(range(1000))


def test_pipe_without_a_reader_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    LineWriter(writer).write("a line")
    os.close(writer)


def test_line_is_json_with_the_daemons_fields(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    reader = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
    log = open_log(tmp_path / "log", tmp_path / "deep" / "file", level="info", namespace="ns", shim="c1")
    log.debug("not.shown")
    log.info("task.created", task="c1", path=Path("/x"))
    heard = os.read(reader, 4096)
    assert heard == (tmp_path / "deep" / "file").read_bytes()
    line = json.loads(heard)
    assert line.pop("time").endswith("Z")
    assert line == {
        "event": "task.created", "level": "info", "namespace": "ns", "shim": "c1", "task": "c1", "path": "/x",
    }  # fmt: skip
    os.close(reader)


@pytest.mark.parametrize("given", [lambda error: True, lambda error: error, lambda error: (ValueError, error, None)])
def test_line_has_the_exception_that_is_given(given: Callable[[Exception], object]) -> None:
    lines: list[str] = []
    log = Log(lines.append, logging.INFO, {"shim": "c1"}).bind(task="c2")
    try:
        raise ValueError("too odd")
    except ValueError as error:
        log.error("task.lost", exc_info=given(error))
    line = json.loads(lines[0])
    assert (line["shim"], line["task"], line["level"]) == ("c1", "c2", "error")
    assert line["exception"].endswith("ValueError: too odd")


def test_log_goes_nowhere_when_nothing_can_be_opened(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    log = open_log(tmp_path / "no-fifo", tmp_path / "file", level="debug")
    log.error("task.lost", error="disk on fire")


def test_level_is_the_least_severe_that_is_written(tmp_path: Path) -> None:
    for level, heard in (("debug", 4), ("info", 3), ("warning", 2), ("error", 1)):
        log = open_log(tmp_path / "no-fifo", tmp_path / level, level=level)
        for word in ("debug", "info", "warning", "error"):
            getattr(log, word)("said")
        assert len((tmp_path / level).read_text().splitlines()) == heard
