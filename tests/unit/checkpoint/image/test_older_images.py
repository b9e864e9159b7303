"""Images of older releases are read and verified: the manifest next to this file and its digests were not made here."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kybernate_shim.checkpoint.image.manifest import NAME, decode, encode
from kybernate_shim.checkpoint.image.store import read_image
from kybernate_shim.checkpoint.image.verification import verify

MANIFEST = Path(__file__).parent / "data" / "manifest-version-1.json"
FILES = {
    "core-1.img": (b"core", 4),
    "pages-1.img": (b"pages", (64 << 20) + 1),  # of two pieces
    "kybernate-vram-1-0.bin": (b"vram", 3 << 20),
    "kybernate-arena-1.bin": (b"arena", 4 << 20),
}


@pytest.fixture
def image(tmp_path: Path) -> Path:
    for name, (beginning, size) in FILES.items():
        (tmp_path / name).write_bytes(beginning)
        os.truncate(tmp_path / name, size)
    shutil.copy(MANIFEST, tmp_path / NAME)
    return tmp_path


def test_older_image_is_whole(image: Path) -> None:
    manifest = read_image(image).manifest
    assert verify(image) == []
    (vram,), (arena,), (gpu,) = manifest.vram, manifest.arena, manifest.gpus
    assert (vram.pid, vram.start, vram.size) == (1, 0x10000, 3 << 20)
    assert [(one.index, one.address, one.size) for one in arena.blocks] == [(0, 0x20000000, 4 << 20)]
    assert [(one.offset, one.size) for one in arena.holes] == [(2 << 20, 2 << 20)]
    assert (gpu.uuid, gpu.model, gpu.driver) == ("GPU-1", "H200", "580.1")
    assert [(step.name, step.seconds, step.spared) for step in manifest.steps] == [
        ("cuda-lock", 0.25, 0),
        ("arena-take", 0.5, 2 << 20),
    ]


@pytest.mark.parametrize("name", FILES)
def test_other_bytes_in_an_older_image_are_found(image: Path, name: str) -> None:
    with (image / name).open("r+b") as file:
        file.write(b"!")
    assert [problem.file for problem in verify(image)] == [name]


def test_manifest_is_written_as_it_always_was() -> None:
    content = MANIFEST.read_bytes()
    assert encode(decode(content)) == content
