"""What of an image on a disk is read while its container is created."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kybernate.node.ahead import files_ahead, reading_ahead
from kybernate_shim.checkpoint.image.manifest import Encryption
from kybernate_shim.checkpoint.image.store import Image
from kybernate_shim.vram_io.files import is_in_memory
from kybernate_shim.vram_io.image_files import VramFile
from tests.bench.page_cache import evict
from tests.fakes.images import PATTERN

VRAM = VramFile(pid=1, file="kybernate-vram-1-0.bin", start=0x1000, size=4096, data_bytes=4096, digest="a digest")


@pytest.fixture
def disk() -> Iterator[Path]:
    """A directory that is on a disk wherever tests run: /tmp may be in memory, or an overlay."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        yield Path(directory)


def test_files_on_a_disk_come_into_memory(disk: Path) -> None:
    files = [disk / "one", disk / "two"]
    for file in files:
        file.write_bytes(bytes(range(256)) * (64 << 10))
    evict(disk)
    assert not any(map(is_in_memory, files))
    with reading_ahead(files):
        until = time.monotonic() + 20
        while not all(map(is_in_memory, files)) and time.monotonic() < until:
            time.sleep(0.01)
    assert all(map(is_in_memory, files))


def test_what_cannot_be_read_is_left_to_the_restore(disk: Path) -> None:
    with reading_ahead([disk / "gone"]):
        pass


def test_nothing_to_read_needs_no_thread() -> None:
    before = set(threading.enumerate())
    with reading_ahead([]):
        assert set(threading.enumerate()) <= before


def test_what_is_mapped_by_a_restore_is_read() -> None:
    whole = replace(PATTERN, vram=(VRAM,))
    image = Image(Path("/images/a"), whole)
    assert files_ahead(image) == (Path("/images/a/kybernate-vram-1-0.bin"),)
    assert files_ahead(Image(Path("/images/a"), PATTERN)) == ()
    assert files_ahead(Image(Path("/images/a"), whole, arriving=True)) == ()
    encrypted = replace(whole, encryption=Encryption("key", "wrapped", 1 << 20))
    assert files_ahead(Image(Path("/images/a"), encrypted)) == ()
