"""`kybernate pool`: what it shows, makes and gives back."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate_shim import config
from kybernate_shim.vram_io import image_pool
from tests.unit.cli.conftest import Node

MIB = 1 << 20


@pytest.fixture
def directory(node: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a node keeps two files of 2 and 4 MiB ready."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        path = Path(name, "pool")
        configure(monkeypatch, path)
        yield path


def configure(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    text = f'[gpu]\nimage_pool = "{path}"\nimage_pool_files = ["2MiB", "4MiB"]\n'
    settings = config.Config().merged(text, by=config.NODE)
    monkeypatch.setattr(config.Config, "load", lambda: settings)


def test_it_is_filled_shown_and_given_back(node: Node, directory: Path) -> None:
    assert node.json("pool") == {"path": str(directory), "ready_bytes": [], "missing_bytes": [2 * MIB, 4 * MIB]}
    assert node.json("pool", "--fill")["ready_bytes"] == [2 * MIB, 4 * MIB]
    image_pool.take(directory, directory.parent / "image", 2 * MIB)
    assert node.run("pool").stdout.splitlines() == [
        "SIZE       STATE",
        "4.00 MiB   ready",
        "2.00 MiB   missing",
    ]
    assert node.json("pool", "--drop")["ready_bytes"] == []
    assert list(directory.iterdir()) == []


def test_without_one_it_says_how_to_have_one(node: Node) -> None:
    said = node.run("pool", status=4).stderr
    assert "this node has no pool of memory for images" in said
    assert "gpu.image_pool_files" in said


def test_what_keeps_it_from_being_filled_is_said(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as disk:
        configure(monkeypatch, Path(disk))
        said = node.run("pool", "--fill", status=4).stderr
    assert "is not on a tmpfs" in said
    assert "checkpoints into memory work" in said
