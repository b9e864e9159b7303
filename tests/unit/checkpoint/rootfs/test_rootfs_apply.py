"""Applying a diff that another program has made: nothing of it lands outside of the root filesystem."""

from __future__ import annotations

import io
import os
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.checkpoint.rootfs.apply import apply_diff, mtime_ns
from kybernate_shim.checkpoint.tree_tar import decimal_seconds
from kybernate_shim.errors import Damaged


class Tar:
    """Builds a tar file entry by entry."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tar = tarfile.open(path, "w", format=tarfile.PAX_FORMAT)  # noqa: SIM115  (closed by `apply`)

    def add(self, name: str, kind: bytes = tarfile.REGTYPE, content: bytes = b"", link: str = "") -> Tar:
        info = tarfile.TarInfo(name)
        info.type, info.linkname, info.size = kind, link, len(content)
        info.uid, info.gid, info.mode = os.getuid(), os.getgid(), 0o755
        self.tar.addfile(info, io.BytesIO(content))
        return self

    def apply(self, root: Path) -> None:
        self.tar.close()
        apply_diff(self.path, root)


@pytest.fixture
def tar(tmp_path: Path) -> Tar:
    return Tar(tmp_path / "diff.tar")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    (path / "etc").mkdir(parents=True)
    (path / "etc/passwd").write_text("inside")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_text("untouched")
    return path


def outside(root: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (root.parent / "outside").iterdir()}


@pytest.mark.parametrize("name", ["../outside/file", "/etc/x", "a/../../outside/file", "etc/../../outside/new"])
def test_a_name_that_leads_out_is_refused(tar: Tar, root: Path, name: str) -> None:
    with pytest.raises(Damaged, match="not a name inside"):
        tar.add(name, content=b"evil").apply(root)
    assert outside(root) == {"file": "untouched"}


@pytest.mark.parametrize("link", ["../outside", "/tmp", "etc"])
def test_a_link_on_the_way_is_refused(tar: Tar, root: Path, link: str) -> None:
    with pytest.raises(Damaged, match="'out' on the way is not a directory"):
        tar.add("out", tarfile.SYMTYPE, link=link).add("out/file", content=b"evil").apply(root)
    assert outside(root) == {"file": "untouched"}


def test_a_link_of_the_image_is_not_followed_either(tar: Tar, root: Path) -> None:
    (root / "out").symlink_to(root.parent / "outside")
    for entry in ("out/file", "out/.wh.file", "out/.wh..wh..opq"):
        with pytest.raises(Damaged, match="on the way"):
            Tar(root.parent / "t.tar").add(entry).apply(root)
    assert outside(root) == {"file": "untouched"}


@pytest.mark.parametrize("again", ["a/.wh.b", ".wh.a"])
def test_hard_links_lead_to_a_directory_that_was_made_again(tar: Tar, root: Path, again: str) -> None:
    for directory in ("a", "a/b"):
        tar.add(directory, tarfile.DIRTYPE)
    tar.add("a/b/one", content=b"1").add("first", tarfile.LNKTYPE, link="a/b/one").add(again)
    for directory in ("a", "a/b"):
        tar.add(directory, tarfile.DIRTYPE)
    tar.add("a/b/two", content=b"2").add("second", tarfile.LNKTYPE, link="a/b/two").apply(root)
    assert [(root / name).read_text() for name in ("first", "second")] == ["1", "2"]


@pytest.mark.parametrize("size", ["-1", "-5"])
def test_file_of_less_than_no_bytes_has_none(tar: Tar, root: Path, size: str) -> None:
    """Or is refused, by tarfile or here: that depends on the version of tarfile."""
    info = tarfile.TarInfo("file")
    info.pax_headers = {"size": size}
    tar.tar.addfile(info)
    with suppress(Damaged):
        tar.add("etc/other", content=b"x").apply(root)
    assert not (root / "file").exists() or not (root / "file").read_bytes()


def test_content_that_ends_too_early_is_refused(tar: Tar, root: Path) -> None:
    tar.add("file", content=b"x" * 4096).tar.close()
    os.truncate(tar.path, 2048)
    with pytest.raises(Damaged, match="unexpected end of data"):
        apply_diff(tar.path, root)


def test_a_link_in_the_place_of_a_file_is_replaced(tar: Tar, root: Path) -> None:
    (root / "out").symlink_to(root.parent / "outside/file")
    tar.add("out", content=b"new").apply(root)
    assert (root / "out").read_text() == "new"
    assert not (root / "out").is_symlink()
    assert outside(root) == {"file": "untouched"}


def test_a_link_in_the_place_of_a_directory_is_replaced(tar: Tar, root: Path) -> None:
    (root / "out").symlink_to(root.parent / "outside")
    tar.add("out", tarfile.DIRTYPE).add("out/file", content=b"new").apply(root)
    assert (root / "out/file").read_text() == "new"
    assert outside(root) == {"file": "untouched"}


def test_a_hard_link_to_the_outside_is_refused(tar: Tar, root: Path) -> None:
    with pytest.raises(Damaged, match="not a name inside"):
        tar.add("x", tarfile.LNKTYPE, link="../outside/file").apply(root)


def test_a_whiteout_deletes_a_tree_and_an_opaque_mark_empties_one(tar: Tar, root: Path) -> None:
    (root / "etc/deep/deeper").mkdir(parents=True)
    (root / "var/old").mkdir(parents=True)
    tar.add("etc", tarfile.DIRTYPE).add("etc/.wh.deep").add("etc/.wh.never-there")
    tar.add("var", tarfile.DIRTYPE).add("var/.wh..wh..opq").add("var/new").apply(root)
    assert sorted(path.name for path in (root / "etc").iterdir()) == ["passwd"]
    assert [path.name for path in (root / "var").iterdir()] == ["new"]


@pytest.mark.parametrize("name", [".wh.", ".wh..", ".wh...", "etc/.wh..."])
def test_a_whiteout_of_nothing_is_refused(tar: Tar, root: Path, name: str) -> None:
    with pytest.raises(Damaged, match="whiteout without a name"):
        tar.add(name).apply(root)
    assert (root / "etc/passwd").read_text() == "inside"


@pytest.mark.parametrize("name", [".", "./"])
def test_the_root_stays_a_directory(tar: Tar, root: Path, name: str) -> None:
    with pytest.raises(Damaged, match="can only be a directory"):
        tar.add(name, content=b"file").apply(root)
    assert (root / "etc/passwd").exists()


def test_a_truncated_file_is_refused(tar: Tar, root: Path) -> None:
    tar.add("a", content=b"x" * 5000).tar.close()
    os.truncate(tar.path, 3000)
    with pytest.raises(Damaged, match="tar: "):
        apply_diff(tar.path, root)


@given(st.binary(max_size=3000))
def test_any_bytes_are_applied_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    directory = tmp_path_factory.mktemp("any")
    (directory / "t.tar").write_bytes(content)
    (directory / "root").mkdir()
    try:
        apply_diff(directory / "t.tar", directory / "root")
    except Damaged:
        pass
    assert sorted(path.name for path in directory.iterdir()) == ["root", "t.tar"]


@given(st.integers(-(10**18), 10**19))
def test_times_keep_their_nanoseconds(time: int) -> None:
    info = tarfile.TarInfo("x")
    info.pax_headers = {"mtime": decimal_seconds(time)}
    assert mtime_ns(info) == time


def test_a_time_without_nanoseconds_is_taken_as_it_is() -> None:
    info = tarfile.TarInfo("x")
    info.mtime = 5
    assert mtime_ns(info) == 5 * 10**9
