"""A dump whose files are in memory while the container is frozen."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.checkpoint import memory_first
from kybernate_shim.checkpoint.dump_request import DumpRequest
from kybernate_shim.checkpoint.image import dump_memory
from kybernate_shim.checkpoint.image.manifest import NAME
from kybernate_shim.checkpoint.image.store import read_image
from kybernate_shim.checkpoint.image.verification import verify
from kybernate_shim.errors import Failed
from tests.unit.checkpoint.dump.dumping import run
from tests.unit.checkpoint.fake_target import FakeAccelerator, FakeTarget


@dataclass
class Memory:
    """The directory in memory, and how it was asked for."""

    place: Path
    full: bool = False
    asked: list[tuple[int, bool]] = field(default_factory=list)


@pytest.fixture
def memory(target: FakeTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Memory:
    """The same container on a node whose disk is slow."""
    memory = Memory(tmp_path / "memory")

    @contextmanager
    def given(name: str, directory: Path, needed: int, limit: int, *, limited: bool) -> Iterator[Path]:
        memory.asked.append((limit, limited))
        memory.place.mkdir()
        try:
            yield memory.place
        finally:
            target.steps.append("memory removed")
            shutil.rmtree(memory.place)

    async def write(argv: Sequence[str]) -> int:
        (memory.place / "inventory.img").write_bytes(b"inventory")
        (memory.place / "pages-1.img").write_bytes(b"pages")
        assert not any(target.image.iterdir())
        return 0

    copy = dump_memory.write_out

    def noted(*arguments: Any) -> None:
        target.steps.append("write")
        copy(*arguments)

    monkeypatch.setattr(dump_memory, "memory_for_dump", given)
    monkeypatch.setattr(dump_memory, "write_out", noted)
    monkeypatch.setattr(dump_memory, "is_full", lambda directory: memory.full)
    target.children.on["checkpoint"] = write
    return memory


def test_container_runs_while_its_image_is_written(target: FakeTarget, memory: Memory) -> None:
    run(target)
    assert target.steps == ["freeze", "checkpoint", "thaw", "write", "memory removed"]
    assert {path.name for path in target.image.iterdir()} == {
        NAME,
        "inventory.img",
        "kybernate-spec.json",
        "pages-1.img",
    }
    assert not verify(target.image)
    assert [step.name for step in read_image(target.image).manifest.steps][-1] == "write"


def test_container_that_ends_needs_no_memory(target: FakeTarget, memory: Memory) -> None:
    target.children.on.pop("checkpoint")
    run(target, exit=True)
    assert not memory.asked


def test_paused_container_needs_no_memory(target: FakeTarget, memory: Memory) -> None:
    target.children.on.pop("checkpoint")
    target.cgroup.frozen = True
    run(target)
    assert not memory.asked


def test_files_are_written_while_the_processes_are_back_on_their_gpus(target: FakeTarget, memory: Memory) -> None:
    run(target, FakeAccelerator(target.steps))
    assert target.steps[-5:] == ["bytes back", "attach", "thaw", "write", "memory removed"]


def test_limit_of_the_node_is_asked_for(target: FakeTarget, memory: Memory) -> None:
    run(target, max_freeze=100)
    assert memory.asked == [(16 << 30, True)]


def test_nothing_is_left_of_an_image_that_the_disk_does_not_take(
    target: FakeTarget, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: Path, place: Path, *_: Any) -> None:
        (place / "pages-1.img").write_bytes(b"pa")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(dump_memory, "write_out", fail)
    with pytest.raises(Failed, match="No space left"):
        run(target)
    assert not target.image.exists()
    assert target.steps == ["freeze", "checkpoint", "thaw", "memory removed"]


def test_memory_that_is_too_small_is_named(target: FakeTarget, memory: Memory) -> None:
    memory.full = True
    target.children.on["checkpoint"] = lambda argv: 1
    with pytest.raises(Failed, match="checkpoint of container") as caught:
        run(target)
    assert "dump_memory = 0" in str(caught.value.__cause__.__notes__)  # type: ignore[union-attr]
    assert not target.cgroup.frozen


@pytest.mark.parametrize(
    ("wanted", "place", "flushed"),
    [
        ({}, "image", True),
        ({"exit": True}, "image", True),
        ({"destination": "disk"}, "image", False),
        ({"destination": "disk", "exit": True}, "disk", True),
    ],
    ids=["disk", "exit", "in memory", "exit, encrypted"],
)
def test_what_the_container_waits_for_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any], place: str, flushed: bool
) -> None:
    measured: list[tuple[Path, bool]] = []

    def rate(directory: Path, *, flushed: bool) -> float:
        measured.append((directory, flushed))
        return 1e9

    monkeypatch.setattr(dump_memory, "write_rate", rate)
    monkeypatch.setattr(dump_memory, "page_cache_room", lambda directory: 10)
    if "destination" in wanted:
        wanted = {**wanted, "destination": tmp_path / wanted["destination"]}
    memory_first.expected(DumpRequest(tmp_path / "image", tmp_path, **wanted), 100)
    assert measured == [(tmp_path / place, flushed)]
