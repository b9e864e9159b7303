"""The memory of dumps on a real kernel: as large as it was asked for, of root alone, and gone afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kybernate_shim.checkpoint.image import dump_memory
from kybernate_shim.checkpoint.image.dump_memory import SPARE, is_full, memory_for_dump, page_cache_room
from kybernate_shim.linux.mount.mountinfo import mount_at
from kybernate_shim.run_directory import DUMPS
from tests.fakes.slow_filesystem import slow_filesystem

pytestmark = pytest.mark.root
NEEDED = 64 << 20
LIMIT = 3 * SPARE


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Path]:
    place, backing = tmp_path / "slow", tmp_path / "backing"
    place.mkdir()
    backing.mkdir()
    with slow_filesystem(place, backing, 16 << 20):
        yield place
    assert not DUMPS.exists()


def test_dump_to_a_slow_filesystem_gets_memory_of_its_size(slow: Path) -> None:
    assert page_cache_room(slow) == 0
    with memory_for_dump("one", slow, NEEDED, LIMIT, limited=False) as directory:
        assert directory is not None
        mount = mount_at(directory)
        assert mount is not None
        assert (mount.path, mount.type) == (directory, "tmpfs")
        assert directory.stat().st_mode & 0o777 == 0o700
        with pytest.raises(OSError, match="No space left"):
            (directory / "pages-1.img").write_bytes(bytes(2 * SPARE))
        assert is_full(directory)
        assert (directory / "pages-1.img").stat().st_size <= NEEDED + SPARE


def test_dump_without_a_need_gets_none(slow: Path) -> None:
    with memory_for_dump("none", Path("/dev/shm"), NEEDED, LIMIT, limited=True) as directory:
        assert directory is None
    with memory_for_dump("none", slow, NEEDED, 0, limited=True) as directory:
        assert directory is None


def test_dumps_keep_to_one_limit(slow: Path) -> None:
    with ExitStack() as stack:
        given = [stack.enter_context(memory_for_dump(name, slow, NEEDED, LIMIT, limited=False)) for name in "abc"]
        assert [one is not None for one in given] == [True, True, False]
    with memory_for_dump("next", slow, NEEDED, LIMIT, limited=False) as directory:
        assert directory is not None


def test_directory_on_a_disk_is_measured_by_what_the_kernel_says(tmp_path: Path) -> None:
    mount = mount_at(tmp_path)
    assert mount is not None
    assert (page_cache_room(tmp_path) > 0) == (mount.type in dump_memory.LOCAL | {"tmpfs"})
