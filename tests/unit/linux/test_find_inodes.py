"""A search for names in a tree of a tenant's: it ends, whatever is in the tree."""

from __future__ import annotations

import os
import time
import tracemalloc
from pathlib import Path

import pytest

from kybernate_shim.linux import find_inodes
from kybernate_shim.linux.beneath import closing, open_top
from kybernate_shim.linux.find_inodes import find_names, identity_of

NOWHERE = {(0, 1)}


def deep(top: Path, levels: int) -> Path:
    """Make directories within each other, with the longest of names."""
    for _ in range(levels):
        top /= "x" * 250
        top.mkdir()
    return top


def test_name_is_found_below(tmp_path: Path) -> None:
    (deep(tmp_path, 5) / "one").touch()
    with closing(open_top(tmp_path)) as top:
        name = "/".join(["x" * 250] * 5) + "/one"
        wanted = identity_of(top, name)
        assert wanted is not None
        assert find_names(top, {wanted}) == {wanted: name}


def test_search_remembers_no_more_names_than_its_room_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_inodes, "MOST_DIRECTORY_BYTES", 1 << 20)
    many = deep(tmp_path, 10)
    for number in range(4000):
        (many / str(number)).mkdir()
    with closing(open_top(tmp_path)) as top:
        tracemalloc.start()
        try:
            assert find_names(top, NOWHERE) == {}
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
        finally:
            tracemalloc.stop()


def test_search_ends_in_the_middle_of_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5000):
        (tmp_path / str(number)).touch()
    late = os.listdir(tmp_path)[-1]  # noqa: PTH208  # in the order in which a search meets them
    clock = iter([0.0, 1.0, *[1e9] * 10])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with closing(open_top(tmp_path)) as top:
        wanted = identity_of(top, late)
        assert wanted is not None
        assert find_names(top, {wanted}) == {}
