"""The output of containers: all of it until the container is gone, for a bounded number of callers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kybernate.agent.service import logs
from kybernate.agent.service.logs import Logs
from kybernate.messages import agent_pb2 as wire
from kybernate.node.container_log import LogFile
from kybernate.node.failure import Missing, Refused

CONTAINER = wire.Container(namespace="k8s.io", id="c1", title="team/pod/app", pod="../../etc", name="passwd")


class Node:
    """A node with one container, whose log is at `path`."""

    def __init__(self, path: Path | str) -> None:
        self.path, self.there = str(path), True
        self.logs = Logs(self._path_of, lambda namespace, id: self.there)

    async def _path_of(self, namespace: str, id: str) -> str:
        assert (namespace, id) == ("k8s.io", "c1")
        return self.path

    async def texts(self, count: int, *, follow: bool = False) -> list[str]:
        found: list[str] = []
        async for some in self.logs.read(CONTAINER, count, follow=follow):
            assert len(some.lines) <= logs.MESSAGE_LINES
            found += [line.text for line in some.lines]
            if follow:  # it goes away in the middle, with a last line
                self.there = False
        return found


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "POLL_SECONDS", 0.001)


def test_lines_are_delivered_until_the_container_is_removed(tmp_path: Path) -> None:
    log = tmp_path / "0.log"
    log.write_text("".join(f"{n}\n" for n in range(1200)))
    node = Node(log)
    assert asyncio.run(node.texts(1100)) == [f"{n}" for n in range(100, 1200)]
    assert asyncio.run(node.texts(2, follow=True)) == ["1198", "1199"]


def test_line_of_any_length_is_no_end_and_delays_no_line_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "POLL_SECONDS", 3600)
    log = tmp_path / "0.log"
    log.write_text("one\n")
    node = Node(log)

    async def scenario() -> list[str]:
        reader = node.logs.read(CONTAINER, 1, follow=True)
        await anext(reader)
        with log.open("a") as written:
            written.write("x" * (3 << 20) + "\ntwo\n")
        node.there = False
        return [line.text for some in [some async for some in reader] for line in some.lines]

    long, two = asyncio.run(asyncio.wait_for(scenario(), 20))
    assert set(long) == {"x"}
    assert two == "two"


def test_output_that_grows_faster_than_it_is_read_ends_where_it_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "0.log").write_text("one\n")
    monkeypatch.setattr(LogFile, "more", lambda log: log.tail(1))
    assert asyncio.run(asyncio.wait_for(Node(tmp_path / "0.log").texts(1), 20)) == ["one"]


def test_output_in_no_file_is_said() -> None:
    with pytest.raises(Missing, match=r"team/pod/app is in no file"):
        asyncio.run(Node("").texts(1))


def test_readers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "FOLLOWED", 2)
    (tmp_path / "0.log").write_text("one\n")
    node = Node(tmp_path / "0.log")

    async def scenario() -> None:
        readers = [node.logs.read(CONTAINER, 1, follow=True) for _ in range(3)]
        for reader in readers[:2]:
            await anext(reader)
        with pytest.raises(Refused, match="2 logs are already being read"):
            await anext(readers[2])
        await readers[0].aclose()  # type: ignore[attr-defined]  # it is a generator
        await anext(node.logs.read(CONTAINER, 1, follow=True))

    asyncio.run(asyncio.wait_for(scenario(), 20))
