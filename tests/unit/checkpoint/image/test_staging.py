"""Which directories become images, and what is left of one that did not."""

from __future__ import annotations

from pathlib import Path

import pytest

from kybernate_shim.checkpoint.image.manifest import NAME
from kybernate_shim.checkpoint.image.staging import staged
from kybernate_shim.checkpoint.image.store import CheckpointInvalid
from kybernate_shim.errors import Refused


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "image"
    path.mkdir(mode=0o755)
    return path


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_directory_that_others_can_read_is_closed(directory: Path) -> None:
    (directory / "dump.log").write_text("of an earlier attempt")
    with staged(directory):
        assert mode(directory) == 0o700


def test_directory_with_other_files_is_left_as_it_is(directory: Path) -> None:
    (directory / "report").write_text("")
    with pytest.raises(Refused, match="chmod 0700"), staged(directory):
        pass
    assert mode(directory) == 0o755


def test_image_of_an_older_release_is_an_image_first(directory: Path) -> None:
    (directory / NAME).write_text("")
    with pytest.raises(CheckpointInvalid, match="contains a checkpoint image already"), staged(directory):
        pass
    assert mode(directory) == 0o755


@pytest.mark.parametrize("made", [True, False])
def test_directory_is_gone_after_a_failure_if_it_was_made(directory: Path, made: bool) -> None:
    image = directory / "new" if made else directory

    def fail() -> None:
        with staged(image):
            (image / "pages-1.img").write_text("")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert (image.exists(), list(directory.iterdir())) == (not made, [])
