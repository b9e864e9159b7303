"""Memory that is ready for images: what is taken of it, what is made of it, and what it must not take from others."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from kybernate_shim.vram_io import image_pool
from kybernate_shim.vram_io.errors import VramError
from kybernate_shim.vram_io.image_pool_filling import fill
from kybernate_shim.vram_io.thread_pool import CopyOptions
from kybernate_shim.vram_mover.load import load
from kybernate_shim.vram_mover.save import save
from tests.fakes.memory_process import MemoryProcess

MIB = 1 << 20
SIZES = (2 * MIB, 4 * MIB, 8 * MIB)


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory on a tmpfs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture
def ready(memory: Path) -> Path:
    """A pool with a file of each size."""
    directory = memory / "pool"
    fill(directory, SIZES)
    return directory


def blocks(file: Path) -> int:
    return file.stat().st_blocks * 512


def test_filling_makes_files_with_all_of_their_pages(ready: Path) -> None:
    assert image_pool.ready(ready) == list(SIZES)
    assert [(file.stat().st_size, file.stat().st_mode & 0o777) for file in sorted(ready.iterdir())] == [
        (blocks(file), 0o600) for file in sorted(ready.iterdir())
    ]
    assert image_pool.lacking(ready, SIZES) == []
    assert image_pool.lacking(ready, (*SIZES, 4 * MIB)) == [4 * MIB]


@pytest.mark.parametrize(
    ("wanted", "taken"),
    [
        (2 * MIB, 2 * MIB),
        (3 * MIB + 1, 4 * MIB),
        (5 * MIB, 4 * MIB),
        (7 * MIB, 8 * MIB),
        (100 * MIB, 8 * MIB),
        (MIB, 0),  # giving 1 MiB back is no less work than making 1 MiB
        (0, 0),
    ],
)
def test_nearest_size_is_taken_where_that_spares_work(ready: Path, memory: Path, wanted: int, taken: int) -> None:
    image = memory / "image"
    assert image_pool.take(ready, image, wanted) == bool(taken)
    assert image.exists() == bool(taken)
    if taken:
        assert image.stat().st_size == taken
    assert image_pool.ready(ready) == [size for size in SIZES if size != taken]


def test_every_file_is_taken_once(memory: Path) -> None:
    directory = memory / "pool"
    fill(directory, [2 * MIB] * 6)
    images = [memory / f"image-{number}" for number in range(16)]
    with ThreadPoolExecutor(16) as threads:
        taken = list(threads.map(lambda image: image_pool.take(directory, image, 2 * MIB), images))
    assert sum(taken) == 6
    assert len({image.stat().st_ino for image in images if image.exists()}) == 6
    assert image_pool.ready(directory) == []


def test_what_is_there_is_not_replaced(ready: Path, memory: Path) -> None:
    image = memory / "image"
    image.write_text("somebody's")
    assert not image_pool.take(ready, image, 2 * MIB)
    assert image.read_text() == "somebody's"
    assert image_pool.ready(ready) == list(SIZES)


def test_image_elsewhere_takes_nothing(ready: Path) -> None:
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as elsewhere:
        assert not image_pool.take(ready, Path(elsewhere, "image"), 1 << 60)
    assert image_pool.ready(ready) == list(SIZES)


def test_no_pool_gives_nothing(memory: Path) -> None:
    assert not image_pool.take(None, memory / "image", MIB)
    assert not image_pool.take(memory / "never-made", memory / "image", MIB)
    assert list(memory.iterdir()) == []


def test_pool_that_others_may_use_is_not_used(ready: Path, memory: Path) -> None:
    ready.chmod(0o755)
    assert not image_pool.take(ready, memory / "image", 2 * MIB)
    with pytest.raises(VramError, match="chmod 700"):
        fill(ready, (*SIZES, 2 * MIB))


def test_filling_replaces_what_was_taken_and_removes_what_is_not_wanted(ready: Path, memory: Path) -> None:
    image_pool.take(ready, memory / "image", 4 * MIB)
    before = {file.name for file in ready.iterdir()}
    (ready / "7-left.unfinished").write_bytes(bytes(7))
    told: list[int] = []
    fill(ready, (4 * MIB, 4 * MIB, 8 * MIB), on_progress=told.append)
    assert image_pool.ready(ready) == [4 * MIB, 4 * MIB, 8 * MIB]
    assert len({file.name for file in ready.iterdir()} & before) == 1
    assert told == [4 * MIB, 8 * MIB]
    assert (memory / "image").stat().st_size == 4 * MIB


def test_two_do_not_fill_at_once(ready: Path) -> None:
    fd = os.open(ready, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        fill(ready, [2 * MIB] * 9)
    finally:
        os.close(fd)
    assert image_pool.ready(ready) == list(SIZES)


def test_machine_keeps_memory_for_its_programs(ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = psutil.virtual_memory()
    found = whole._replace(available=whole.total // 16 + 3 * MIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: found)
    with pytest.raises(VramError, match="the pool gets no more memory, 4 MiB are missing"):
        fill(ready, (*SIZES, 2 * MIB, 4 * MIB))
    assert image_pool.ready(ready) == [2 * MIB, *SIZES]


def test_pool_has_to_be_in_memory() -> None:
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as directory:
        with pytest.raises(VramError, match="not on a tmpfs"):
            fill(Path(directory), SIZES)
        assert list(Path(directory).iterdir()) == []


def test_dropping_gives_the_memory_back(ready: Path) -> None:
    assert image_pool.drop(ready, Counter(SIZES)) == sum(SIZES)
    assert list(ready.iterdir()) == []


@pytest.mark.parametrize("threads", [2, 8])  # by pwrite, and by a mapping
@pytest.mark.parametrize("size", [7 * MIB, 8 * MIB, 11 * MIB])
def test_region_in_memory_of_the_pool_comes_back_and_its_zeros_are_holes(
    ready: Path, memory: Path, size: int, threads: int
) -> None:
    how = CopyOptions(threads=threads, piece_bytes=MIB, pool=ready)
    with MemoryProcess() as target:
        region = target.region("a", size)
        target.fill("a", 0, 2 * MIB)
        target.fill("a", 3 * MIB + 300_000, 4 * MIB, seed=2)
        before = target.digest("a")
        (saved,) = save(target.pid, [region], memory, ["image"], how)
        assert 8 * MIB not in image_pool.ready(ready)
        image = memory / "image"
        assert image.stat().st_size == size
        assert blocks(image) == saved.data_bytes < 3 * MIB
        target.drop([saved])
        load(target.pid, [saved], memory, how)
        assert target.digest("a") == before
