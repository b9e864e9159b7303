"""Looks that ask no server: a filesystem that does not answer keeps nothing waiting."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.checkpoint.volumes.places import open_volume
from kybernate_shim.linux.mount import syscalls
from kybernate_shim.linux.statx import status_at, status_of
from tests.fakes.silent_filesystem import NAME, SilentFilesystem, silent_filesystem

pytestmark = pytest.mark.root
SECONDS = 5.0


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (made := tmp_path / "volume").mkdir()
    return made


@pytest.fixture
def filesystem(place: Path) -> Iterator[SilentFilesystem]:
    with silent_filesystem(place) as one:
        yield one


def answered(filesystem: SilentFilesystem, look: Callable[[], Any]) -> Any:
    """Return what a look returns while the server is silent. Raises TimeoutError."""
    with ThreadPoolExecutor(1) as apart:
        filesystem.speaking.clear()
        try:
            return apart.submit(look).result(SECONDS)
        finally:
            filesystem.speaking.set()


def test_file_is_known_without_its_server(filesystem: SilentFilesystem, place: Path) -> None:
    fd = os.open(place / NAME, os.O_RDONLY)
    wanted = os.fstat(fd)
    for found in (
        answered(filesystem, lambda: status_of(f"/proc/self/fd/{fd}")),
        answered(filesystem, lambda: status_at(fd)),
    ):
        assert (found.st_dev, found.st_ino, found.st_mode, found.st_nlink) == (
            wanted.st_dev, wanted.st_ino, wanted.st_mode, wanted.st_nlink,
        )  # fmt: skip
    os.close(fd)


def test_stat_would_wait_for_the_server(filesystem: SilentFilesystem, place: Path) -> None:
    fd = os.open(place / NAME, os.O_RDONLY)
    with pytest.raises(TimeoutError):
        answered(filesystem, lambda: os.fstat(fd))
    os.close(fd)


def test_volume_that_is_covered_is_refused_without_its_server(filesystem: SilentFilesystem, place: Path) -> None:
    def refusal() -> str:
        with pytest.raises(OSError, match="a filesystem of the kind") as error:
            open_volume(str(place))
        return str(error.value)

    assert "a filesystem of the kind fuse is mounted on the volume" in answered(filesystem, refusal)


def test_volume_of_the_kubelets_filesystem_or_in_memory_is_opened(place: Path) -> None:
    (place / "file").touch()
    fd = open_volume(str(place))
    assert os.listdir(fd) == ["file"]  # noqa: PTH208  # by its descriptor
    os.close(fd)
    syscalls.mount("tmpfs", str(place), "tmpfs", 0, "size=1m")
    try:
        fd = open_volume(str(place))
        assert os.listdir(fd) == []  # noqa: PTH208
        os.close(fd)
    finally:
        syscalls.umount(str(place), 0)


def test_link_in_the_place_of_a_volume_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc")
    with pytest.raises(OSError, match="directory"):
        open_volume(str(tmp_path / "link"))


def test_numbers_are_those_of_stat(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.link(tmp_path / "file", tmp_path / "other")
    for path in (tmp_path, tmp_path / "file", Path("/dev/null"), Path("/proc/self/exe")):
        wanted, found = path.stat(), status_of(str(path))
        assert found == (wanted.st_mode, wanted.st_nlink, wanted.st_dev, wanted.st_ino, wanted.st_rdev)
    assert stat.S_ISREG(status_of(str(tmp_path / "file")).st_mode)
