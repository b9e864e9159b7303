"""Overlay options: when they fit, and how they are made shorter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.linux.mount.idmap import map_lines
from kybernate_shim.linux.mount.overlay import fits, in_directory, lower_directories, relative

NAMES = st.text(st.characters(exclude_characters="/:\\,\0", exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda name: name not in (".", "..")
)
PATHS = st.lists(NAMES, min_size=1, max_size=4).map(lambda names: "/" + "/".join(names))


def test_snapshotter_layers_become_short() -> None:
    layers = [f"/var/lib/containerd/snapshots/{number}/fs" for number in range(3)]
    parent, options = relative(["index=off", "upperdir=/u", "lowerdir=" + ":".join(layers), "userxattr"])
    assert parent == "/var/lib/containerd/snapshots"
    assert options == ["index=off", "upperdir=/u", "lowerdir=0/fs:1/fs:2/fs", "userxattr"]


@given(st.lists(PATHS, min_size=1, max_size=8))
def test_relative_layers_name_the_same_directories(layers: list[str]) -> None:
    parent, options = relative(["lowerdir=" + ":".join(layers)])
    names = lower_directories(options)
    assert [str(Path(parent, name)) for name in names] == layers
    assert all(name and Path(name).parts[0] not in (".", "..") for name in names)


def test_escaped_colon_does_not_separate_layers() -> None:
    assert lower_directories([r"lowerdir=/a\:b:/c\\:/d"]) == [r"/a\:b", r"/c\\", "/d"]
    assert relative([r"lowerdir=/x\:y/1:/x\:y/2"]) == ("/x:y", ["lowerdir=1:2"])


@pytest.mark.parametrize("options", [[], ["upperdir=/u"], ["lowerdir=a:/b"]])
def test_options_without_absolute_layers_stay(options: list[str]) -> None:
    assert relative(options) == (".", options)


def test_a_page_less_one_byte_fits() -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    assert fits(["a" * (page - 1)])
    assert not fits(["a" * page])
    assert not fits(["a" * (page - 2), "b"])
    assert not fits(["ä" * (page // 2)])


def test_working_directory_is_the_threads_own(tmp_path: Path) -> None:
    before, seen = Path.cwd(), []
    in_directory(str(tmp_path), lambda: seen.append(Path.cwd()))
    assert seen == [tmp_path]
    assert Path.cwd() == before


def test_failure_in_the_thread_is_the_callers() -> None:
    with pytest.raises(FileNotFoundError):
        in_directory("/no/such/directory", lambda: None)


def test_id_map_lines() -> None:
    assert map_lines("0:1000:65536") == "0 1000 65536\n"
    assert map_lines("0:1000:1,1:5:2") == "0 1000 1\n1 5 2\n"


@pytest.mark.parametrize("text", ["", "0:1", "0:1:x", "0:1:-1", "0:1:2,", "0:1:2:3", "0:1:²"])
def test_malformed_id_map_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="inside:outside:count"):
        map_lines(text)
