"""Memory for dumps: when a dump gets some, and how it comes to the disk."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.checkpoint.image import dump_memory
from kybernate_shim.checkpoint.image.dump_memory import (
    PAGE,
    SPARE,
    memory_room,
    memory_wanted,
    page_cache_room,
    write_out,
    write_rate,
)
from kybernate_shim.errors import Stopped
from kybernate_shim.linux.mount.mountinfo import parse_line

GIB = 1 << 30
VMSTAT = "nr_dirty 1000\nnr_writeback 200\nnr_dirty_threshold 9000\nnr_dirty_background_threshold 5000\nother 7\n"


@pytest.mark.parametrize(
    ("needed", "page_cache", "rate", "limited", "gets"),
    [
        (GIB, 2 * GIB, 1, False, 0),  # the page cache takes it
        (GIB, 2 * GIB - 1, 1, True, GIB + SPARE),  # it does now, but another program may fill it
        (GIB, 2 * GIB, 1, True, 0),
        (4 * GIB, 2 * GIB, GIB, False, 4 * GIB + GIB // 2),
        (4 * GIB, 2 * GIB, 4 * GIB, False, 0),  # the disk takes the rest in half a second
        (4 * GIB, 2 * GIB, 4 * GIB - 1, False, 4 * GIB + GIB // 2),
        (4 * GIB, 2 * GIB, 4 * GIB, True, 4 * GIB + GIB // 2),
        (0, 0, 1, False, 0),
        (1, 0, 1, False, SPARE + 1),
        (1, 0, 1e9, False, 0),
        (GIB, sys.maxsize, 1, True, 0),  # it goes to memory already
    ],
)
def test_memory_is_wanted_where_the_disk_would_make_a_dump_wait(
    needed: int, page_cache: int, rate: float, limited: bool, gets: int
) -> None:
    assert memory_wanted(needed, page_cache, lambda: rate, limited=limited) == gets


def test_disk_is_not_measured_where_the_page_cache_takes_all() -> None:
    def measure() -> float:
        raise AssertionError("measured")

    assert not memory_wanted(GIB, 2 * GIB, measure, limited=False)


def _on(monkeypatch: pytest.MonkeyPatch, type_: str, options: str = "rw") -> None:
    mount = parse_line(f"1 0 8:1 / / rw,relatime - {type_} /dev/sda1 {options}".encode())
    monkeypatch.setattr(dump_memory, "mount_at", lambda directory: mount)


@pytest.mark.parametrize("type_", ["ext4", "xfs", "btrfs"])
def test_page_cache_of_a_local_disk_takes_as_much_as_makes_no_writer_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, type_: str
) -> None:
    _on(monkeypatch, type_)
    (tmp_path / "vmstat").write_text(VMSTAT)
    assert page_cache_room(tmp_path, tmp_path / "vmstat") == (7000 - 1200) * PAGE


@pytest.mark.parametrize(("type_", "options"), [("nfs4", "rw"), ("fuse", "rw"), ("zfs", "rw"), ("ext4", "rw,sync")])
def test_filesystems_that_wait_at_each_write_or_close_take_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, type_: str, options: str
) -> None:
    _on(monkeypatch, type_, options)
    assert page_cache_room(tmp_path) == 0


def test_full_page_cache_takes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _on(monkeypatch, "ext4")
    (tmp_path / "vmstat").write_text(VMSTAT.replace("nr_dirty 1000", "nr_dirty 8000"))
    assert page_cache_room(tmp_path, tmp_path / "vmstat") == 0


@pytest.mark.parametrize("flushed", [False, True])
def test_measuring_a_directory_leaves_nothing_in_it(tmp_path: Path, flushed: bool) -> None:
    assert write_rate(tmp_path, flushed=flushed) > 0
    assert not list(tmp_path.iterdir())


def test_memory_takes_all() -> None:
    assert page_cache_room(Path("/dev/shm")) == sys.maxsize


def test_dumps_of_all_daemons_keep_to_one_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(dump_memory, "DUMPS", tmp_path / "dumps")
    monkeypatch.setattr(dump_memory, "_available", lambda: 64 * GIB)
    assert memory_room(16 * GIB) == 16 * GIB
    for name in (f"a.b.{3 * GIB}.17.4711", f"c.{GIB}.18.4711", "no name of ours"):
        (tmp_path / "dumps" / name).mkdir(parents=True)
    assert memory_room(16 * GIB) == 12 * GIB
    assert memory_room(4 * GIB) == 0


def test_half_of_the_nodes_memory_stays_with_its_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(dump_memory, "DUMPS", tmp_path / "dumps")
    monkeypatch.setattr(dump_memory, "_available", lambda: 10 * GIB)
    assert memory_room(16 * GIB) == 5 * GIB
    (tmp_path / "dumps" / f"a.{4 * GIB}.17.4711").mkdir(parents=True)
    assert memory_room(16 * GIB) == 3 * GIB


@pytest.fixture
def source(tmp_path: Path) -> Path:
    place = tmp_path / "source"
    place.mkdir()
    (place / "pages-1.img").write_bytes(b"pages" * 100_000)
    (place / "empty.img").write_bytes(b"")
    (place / "dump.log").write_bytes(b"log")
    (tmp_path / "target").mkdir()
    return place


def test_files_are_copied_with_their_bytes_for_root_alone(source: Path, tmp_path: Path) -> None:
    done: list[int] = []
    write_out(source, tmp_path / "target", done.append)
    copied = {path.name: path for path in (tmp_path / "target").iterdir()}
    assert {name: path.read_bytes() for name, path in copied.items()} == {
        path.name: path.read_bytes() for path in source.iterdir()
    }
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in copied.values())
    assert sum(done) == 500_003


def test_file_that_is_there_already_is_not_replaced(source: Path, tmp_path: Path) -> None:
    (tmp_path / "target" / "pages-1.img").symlink_to("/etc/passwd")
    with pytest.raises(FileExistsError):
        write_out(source, tmp_path / "target", lambda count: None)


def test_log_of_a_former_dump_is_replaced(source: Path, tmp_path: Path) -> None:
    (tmp_path / "target" / "dump.log").write_text("of the dump that failed")
    write_out(source, tmp_path / "target", lambda count: None)
    assert (tmp_path / "target" / "dump.log").read_text() == "log"


def test_link_in_the_memory_is_not_followed(source: Path, tmp_path: Path) -> None:
    (source / "link.img").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match=r"link\.img"):
        write_out(source, tmp_path / "target", lambda count: None)


def test_copy_ends_when_it_is_stopped(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump_memory, "CHUNK", 1000)
    looks: Any = iter([False, False])
    with pytest.raises(Stopped, match="not copied to its end"):
        write_out(source, tmp_path / "target", lambda count: None, lambda: next(looks, True))
