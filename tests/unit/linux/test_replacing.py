"""A file's content is replaced as a whole, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from kybernate_shim.linux.replacing import replacing


def test_new_content_is_there_at_the_end_and_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    with replacing(file) as new:
        new.write("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new"
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_failure_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")

    def fail() -> None:
        with replacing(file) as new:
            new.write("half")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]
