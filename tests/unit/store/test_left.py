"""Images that a killed process was bringing to their places are removed; those that arrive, and whole ones, stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from kybernate.node.failure import Refused
from kybernate.store.streaming.left import remove_all_left, remove_left
from kybernate_shim.checkpoint.image.manifest import NAME
from kybernate_shim.vram_io.arrival import Description, begin


def arriving(directory: Path, *, alive: bool) -> None:
    directory.mkdir(parents=True)
    record = begin(directory, Description({}))
    if not alive:
        record.close()
    else:
        KEPT.append(record)


KEPT: list[object] = []  # a record that is collected is closed


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    arriving(tmp_path / "web", alive=False)
    arriving(tmp_path / "team" / "web", alive=False)
    arriving(tmp_path / "team" / "comes", alive=True)
    arriving(tmp_path / "whole", alive=False)
    (tmp_path / "whole" / NAME).touch()
    (tmp_path / "team" / "checkpoint").mkdir()
    assert set(remove_all_left(tmp_path)) == {tmp_path / "web", tmp_path / "team" / "web"}
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_dir()}
    assert left == {"team", "team/comes", "team/checkpoint", "whole"}


def test_place_of_an_image_that_comes_is_not_taken(tmp_path: Path) -> None:
    arriving(tmp_path / "web", alive=True)
    with pytest.raises(Refused, match="another process"):
        remove_left(tmp_path / "web")
    assert not remove_left(tmp_path / "nothing")
