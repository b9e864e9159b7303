"""Changed files are not written to their end once no diff is wanted any more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kybernate_shim.checkpoint.rootfs.diff import write_diff
from kybernate_shim.checkpoint.rootfs.overlay import Overlay
from kybernate_shim.errors import Stopped


@pytest.mark.parametrize("sparse", [False, True])
def test_stopped_diff_leaves_no_file(tmp_path: Path, sparse: bool) -> None:
    """In the middle of its only file, which may have a hole."""
    upper, diff = tmp_path / "upper", tmp_path / "diff.tar"
    upper.mkdir()
    with (upper / "data").open("wb") as file:
        file.write(os.urandom(1 << 20))
        file.truncate(8 << 20 if sparse else 1 << 20)
    looks = iter(range(4))
    with pytest.raises(Stopped, match="the diff was stopped before its end"):
        write_diff(Overlay(upper), diff, stopped=lambda: next(looks, None) is None)
    assert not diff.exists()


def test_stop_is_noticed_between_many_small_files(tmp_path: Path) -> None:
    upper, diff = tmp_path / "upper", tmp_path / "diff.tar"
    for name in "abc":
        (upper / name).mkdir(parents=True)
    looks = iter(range(2))
    with pytest.raises(Stopped, match="the diff was stopped before its end"):
        write_diff(Overlay(upper), diff, stopped=lambda: next(looks, None) is None)
    assert not diff.exists()
