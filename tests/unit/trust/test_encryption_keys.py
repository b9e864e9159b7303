"""The file with the node's keys for images: private, well-formed, and in its order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kybernate_shim.errors import Refused
from kybernate_shim.trust.encryption import NodeKey
from kybernate_shim.trust.encryption_keys import data_key, read_keys

ONE, OTHER = "11" * 32, "22" * 32


def key_file(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_keys_are_read_in_order(tmp_path: Path) -> None:
    file = key_file(tmp_path / "k", f"# new\n{ONE}\n\n  {OTHER.upper()}  \n")
    assert [key.key.hex() for key in read_keys(file)] == [ONE, OTHER.lower()]


@pytest.mark.parametrize(
    "text", ["", "# none\n", f"{ONE}\n{ONE[:-1]}\n", f"{ONE}00\n", "zz" * 32, ONE[:32] + " " + ONE[32:], "ü" * 64]
)
def test_file_without_valid_keys_is_refused_and_no_key_is_told(tmp_path: Path, text: str) -> None:
    with pytest.raises(Refused, match="key") as refusal:
        read_keys(key_file(tmp_path / "k", text))
    assert str(tmp_path / "k") in str(refusal.value)
    assert ONE[:16] not in str(refusal.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o677])
def test_file_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(Refused, match="chmod 600"):
        read_keys(key_file(tmp_path / "k", ONE, mode))


def test_link_fifo_directory_and_missing_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(key_file(tmp_path / "k", ONE))
    os.mkfifo(tmp_path / "fifo", 0o600)
    (tmp_path / "directory").mkdir()
    for name in ("link", "fifo", "directory", "missing"):
        with pytest.raises(Refused, match=name):
            read_keys(tmp_path / name)


def test_long_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="longer"):
        read_keys(key_file(tmp_path / "k", f"{ONE}\n" * 2000))


def test_data_key_is_opened_by_whichever_key_wrapped_it(tmp_path: Path) -> None:
    wrapped = NodeKey(bytes.fromhex(OTHER)).wrap(b"d" * 32, "image")
    assert data_key(key_file(tmp_path / "k", f"{ONE}\n{OTHER}\n"), wrapped, "image") == b"d" * 32
    with pytest.raises(Refused, match=wrapped.key_id):
        data_key(key_file(tmp_path / "k", f"{ONE}\n"), wrapped, "image")
    with pytest.raises(Refused, match="set encryption_key"):
        data_key(None, wrapped, "image")
