"""What the report on a node says of its arena."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kybernate.node import health
from kybernate_shim.arena import banks
from kybernate_shim.arena.banks import Bank
from kybernate_shim.arena.extents import Extent
from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.config import Config, GpuSettings
from kybernate_shim.sizes import NO_NODE, NodeSizes

GIB = 1 << 30


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the arena of a node with two NUMA nodes of 8 GiB is."""
    monkeypatch.setattr(health, "Memory", lambda sizes: Memory(sizes, tmp_path))
    monkeypatch.setattr(health, "memory_of_nodes", lambda: {0: 8 * GIB, 1: 8 * GIB})
    return tmp_path


def look(*sizes: tuple[int, int]) -> list[tuple[str, str, str]]:
    config = Config(gpu=GpuSettings(arena=sizes))
    return [(found.verdict, found.found, found.advice) for found in health._arena(config)]


def make(folder: Path, *made: Bank) -> None:
    with (folder / "memory").open("wb") as file:
        file.truncate(banks.size_of(made))
    banks.write(folder / "banks", made)


def test_node_without_an_arena_has_no_line(folder: Path) -> None:
    assert look() == []


def test_parts_are_told_by_their_nodes(folder: Path) -> None:
    sizes: NodeSizes = ((0, 2 * GIB), (1, GIB))
    assert look(*sizes) == [("ok", "2.0 GiB on NUMA node 0, 1.0 GiB on NUMA node 1, allocated at its first use", "")]
    make(folder, Bank(0, Extent(0, 2 * GIB)), Bank(1, Extent(2 * GIB, GIB)))
    assert look(*sizes) == [("ok", "2.0 GiB on NUMA node 0, 1.0 GiB on NUMA node 1; 3.0 GiB free", "")]
    ((verdict, found, advice),) = look((0, GIB), (1, 2 * GIB))
    assert (verdict, found) == ("note", "2.0 GiB on NUMA node 0, 1.0 GiB on NUMA node 1; 3.0 GiB free")
    assert "in effect at the next call of the CUDA helper" in advice


def test_room_is_told_by_who_has_it(folder: Path) -> None:
    make(folder, Bank(NO_NODE, Extent(0, 3 * GIB)))
    memory = Memory(((NO_NODE, 3 * GIB),), folder)
    memory.update(ArenaOwner.of(os.getpid()), [(0, 0x1000, GIB)], account="pod b")
    memory.update(ArenaOwner.of(os.getppid()), [(0, 0x1000, GIB // 2)], account="pod a")
    ((_, found, _),) = look((NO_NODE, 3 * GIB))
    assert found == "3.0 GiB; 1.5 GiB free; 0.5 GiB of pod a; 1.0 GiB of pod b"


def test_arena_of_no_node_is_one_size(folder: Path) -> None:
    make(folder, Bank(NO_NODE, Extent(0, 3 * GIB)))
    assert look((NO_NODE, 3 * GIB)) == [("ok", "3.0 GiB; 3.0 GiB free", "")]


def test_size_that_cannot_be_is_told_with_the_reason(folder: Path) -> None:
    ((verdict, found, advice),) = look((0, GIB), (2, GIB))
    assert (verdict, found) == ("bad", "1.0 GiB on NUMA node 0, 1.0 GiB on NUMA node 2")
    assert "names NUMA node 2, and this machine has 0, 1" in advice
