"""The log of the long-running programs: lines as the shims write them, with the ids of what they are about."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pty
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kybernate.agent.access.interceptor import request_id
from kybernate.logs import add_ids, open_log, with_ids
from kybernate_shim.logs import LineWriter, Log


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Any]:
    with (tmp_path / "log").open("w+b") as file:
        log = open_log("info", fd=file.fileno())
        yield log, lambda: [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    logging.basicConfig(handlers=[], force=True)


def test_line_has_the_form_of_the_shims_lines(lines: Any, tmp_path: Path) -> None:
    log, read = lines
    error = ValueError("no")
    log.error("task.ended", task="c1", path=Path("/x"), exc_info=error)
    with (tmp_path / "shim").open("wb") as file:
        shim = Log(LineWriter(file.fileno()).write, logging.INFO, {})
        shim.error("task.ended", task="c1", path=Path("/x"), exc_info=error)
    (ours,) = read()
    theirs = json.loads((tmp_path / "shim").read_text())
    assert list(ours) == list(theirs)
    assert len(ours["time"]) == len(theirs["time"])
    assert {**ours, "time": ""} == {**theirs, "time": ""}


def test_line_below_the_level_is_left_out(lines: Any) -> None:
    log, read = lines
    log.debug("not.shown")
    assert read() == []


def test_lines_of_a_task_have_its_ids_and_others_have_not(lines: Any) -> None:
    log, read = lines

    async def work(name: str) -> None:
        await asyncio.sleep(0)
        log.info("step", name=name)

    async def main() -> None:
        tasks = [asyncio.create_task(work(id), context=with_ids(operation=id, verb="")) for id in ("a", "b")]
        await asyncio.gather(*tasks, work("none"))

    asyncio.run(main())
    assert {(one["name"], one.get("operation")) for one in read()} == {("a", "a"), ("b", "b"), ("none", None)}
    assert all("verb" not in one for one in read())


def test_ids_end_with_the_task_that_has_added_them(lines: Any) -> None:
    log, read = lines

    async def call() -> None:
        add_ids(request="r1")
        log.info("inside")

    async def main() -> None:
        await asyncio.create_task(call())
        log.info("outside")

    asyncio.run(main())
    assert [one.get("request") for one in read()] == ["r1", None]


def test_what_libraries_log_comes_out_in_the_same_form(lines: Any) -> None:
    _, read = lines
    logging.getLogger("grpc").warning("100%% of %s", "x")
    logging.getLogger("grpc").info("not shown")
    (line,) = read()
    assert (line["event"], line["logger"], line["level"]) == ("100% of x", "grpc", "warning")


def test_full_pipe_costs_lines_and_no_time() -> None:
    reader, writer = os.pipe2(os.O_NONBLOCK)
    log = open_log("info", fd=writer)
    for number in range(300):
        log.info("filled", number=number, text="x" * 1000)
    held = os.read(reader, 1 << 20)
    log.info("later")
    assert b"log.lost" in os.read(reader, 1 << 20)
    assert held.count(b"\n") < 300
    os.close(reader)
    os.close(writer)


def test_terminal_gets_lines_for_people() -> None:
    parent, child = pty.openpty()
    log = open_log("info", fd=child)
    log.info("agent.started", socket="/run/x.sock")
    shown = os.read(parent, 4096).decode()
    assert "agent.started" in shown
    assert "/run/x.sock" in shown
    with pytest.raises(ValueError, match="Expecting value"):
        json.loads(shown)
    os.close(parent)
    os.close(child)


@pytest.mark.parametrize("given", ["", "x" * 200, "a\nb", b"bytes"])
def test_request_id_is_the_callers_where_it_can_be_logged(given: str | bytes) -> None:
    assert request_id([("x-request-id", "web-17")]) == "web-17"
    made = request_id([("x-request-id", given)])
    assert made != given
    assert len(made) == 16
    assert len(request_id(None)) == 16
