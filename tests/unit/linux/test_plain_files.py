"""Regular files are read; what would block, act or lead elsewhere is refused without being opened."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kybernate_shim.linux.plain_files import NotPlain, open_plain, read_plain

MOST = 100


def test_content_is_returned_up_to_the_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * MOST)
    assert read_plain(tmp_path / "file", most=MOST) == b"x" * MOST


def test_name_below_a_directory_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    directory = os.open(tmp_path, os.O_PATH)
    try:
        assert read_plain("file", directory=directory, most=MOST) == b"content"
    finally:
        os.close(directory)


def test_descriptor_is_not_inherited(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    fd = open_plain(tmp_path / "file")
    try:
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_fifo_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "file")
    with pytest.raises(NotPlain, match="not a regular file"):
        read_plain(tmp_path / "file", most=MOST)


def test_link_is_refused_wherever_it_leads(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"secret")
    for target in ("other", "nowhere", "/dev/zero"):
        (tmp_path / "file").unlink(missing_ok=True)
        (tmp_path / "file").symlink_to(target)
        with pytest.raises(NotPlain):
            read_plain(tmp_path / "file", most=MOST)


def test_directory_device_and_socket_are_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
    for path in (tmp_path, Path("/dev/zero"), tmp_path / "socket"):
        with pytest.raises(NotPlain):
            read_plain(path, most=MOST)


def test_sparse_file_is_refused_by_its_size_alone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", 1 << 40)
    with pytest.raises(OSError, match="larger than 100 bytes"):
        read_plain(tmp_path / "file", most=MOST)


def test_file_that_grows_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * MOST)
    read = os.read

    def growing(fd: int, count: int) -> bytes:
        with path.open("ab") as stream:
            stream.write(b"y")
        return read(fd, count)

    monkeypatch.setattr(os, "read", growing)
    with pytest.raises(OSError, match="larger than"):
        read_plain(path, most=MOST)
