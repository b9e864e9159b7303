"""The log of a pod's container is followed over restarts and rotations, and only names of Kubernetes are looked up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kybernate.page import log_file
from kybernate.page.source import LogAbsent
from kybernate.page.view import Container

CONTAINER = Container("k8s.io/1", "default/web/nginx", pod_namespace="default", pod="web", name="nginx")


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "POLL_SECONDS", 0.001)


def line(text: str) -> str:
    return f"2026-01-01T00:00:00.000000000Z stdout F {text}\n"


async def taken(lines: AsyncIterator[str], count: int) -> list[str]:
    async with asyncio.timeout(20):
        return [await anext(lines) for _ in range(count)]


def test_lines_are_followed_over_a_rotation_and_a_restart(tmp_path: Path) -> None:
    directory = tmp_path / "default_web_1234/nginx"
    directory.mkdir(parents=True)
    log = directory / "0.log"
    log.write_text(line("one") + line("two"))

    async def follow() -> None:
        lines = log_file.follow(CONTAINER, tmp_path)
        assert await taken(lines, 2) == ["one", "two"]
        log.rename(directory / "0.log.20260101-000000")
        log.write_text(line("three"))
        assert await taken(lines, 1) == ["three"]
        (directory / "1.log").write_text(line("four"))
        assert await taken(lines, 1) == ["four"]
        await lines.aclose()  # type: ignore[attr-defined]  # it is a generator

    asyncio.run(follow())


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    directory = tmp_path / "default_web_1234/nginx"
    directory.mkdir(parents=True)
    (directory / "0.log").write_text("".join(line(f"{n:05}") for n in range(5000)))

    async def follow() -> list[str]:
        return await taken(log_file.follow(CONTAINER, tmp_path), 1)

    (first,) = asyncio.run(follow())
    assert 0 < int(first) < 5000


@pytest.mark.parametrize("name", ["", "..", "../../etc", "a/b", "A", "a\n", "*"])
def test_other_names_are_not_looked_up(tmp_path: Path, name: str) -> None:
    container = Container("k8s.io/1", "x", pod_namespace="default", pod="web", name=name)
    with pytest.raises(LogAbsent, match="not the container of a pod"):
        asyncio.run(taken(log_file.follow(container, tmp_path), 1))


def test_link_is_not_followed(tmp_path: Path) -> None:
    directory = tmp_path / "default_web_1234/nginx"
    directory.mkdir(parents=True)
    (directory / "0.log").symlink_to("/etc/passwd")
    with pytest.raises(LogAbsent, match="cannot be opened"):
        asyncio.run(taken(log_file.follow(CONTAINER, tmp_path), 1))


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"2026-01-01T00:00:00Z stderr P part", "part"),
        (b"2026-01-01T00:00:00Z stdout F ", ""),
        (b"no such line", "no such line"),
        (b"2026-01-01T00:00:00Z stdout F \xff", "\ufffd"),
        (b"t stdout F " + b"x" * 10_000, "x" * log_file.LINE_CHARACTERS),
    ],
)
def test_text_of_a_line(written: bytes, shown: str) -> None:
    assert log_file.text_of(written) == shown
