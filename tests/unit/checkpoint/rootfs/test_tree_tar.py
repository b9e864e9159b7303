"""Files that others change while they become entries of a tar file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kybernate_shim.checkpoint.tree_tar import data_of
from kybernate_shim.linux.beneath import closing, open_top, walk

MIB = 1 << 20


def test_stretches_of_data_are_within_the_size_that_the_file_had(tmp_path: Path) -> None:
    """It was made sparse, and longer, since it was looked at."""
    with (tmp_path / "file").open("wb") as file:
        os.pwrite(file.fileno(), b"x", 0)
        os.pwrite(file.fileno(), b"x", 8 * MIB)
        whole = list(data_of(file.fileno(), 8 * MIB + 1))
        assert whole[-1] == (8 * MIB + 1, 0)
        for size in (MIB, 4 * MIB):
            found = list(data_of(file.fileno(), size))
            assert found[-1] == (size, 0)
            assert all(offset + length <= size and length >= 0 for offset, length in found)


def test_file_that_ends_between_data_and_hole_has_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.lseek

    def lseek(fd: int, offset: int, how: int) -> int:
        found = real(fd, offset, how)
        if how == os.SEEK_DATA:
            os.ftruncate(fd, 0)
        return found

    with (tmp_path / "file").open("wb") as file:
        os.pwrite(file.fileno(), bytes(MIB), MIB)
        monkeypatch.setattr(os, "lseek", lseek)
        assert list(data_of(file.fileno(), 2 * MIB)) == [(2 * MIB, 0)]


def test_attribute_that_is_removed_meanwhile_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    os.setxattr(tmp_path / "file", "user.stays", b"1")
    real = os.listxattr
    monkeypatch.setattr(os, "listxattr", lambda place: ["user.gone", *real(place)])
    with closing(open_top(tmp_path)) as top:
        (found,) = [one.attributes() for one in walk(top) if one.name == "file"]
    assert found["user.stays"] == b"1"
    assert "user.gone" not in found
