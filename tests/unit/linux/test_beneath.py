"""A tree that changes while it is walked: nothing outside of it is reached, and nothing in it makes the walk wait."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate_shim.linux import beneath
from kybernate_shim.linux.beneath import FirstNames, Limits, TreeFile, closing, open_top, walk


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory next to another one that has a secret."""
    (tmp_path / "node").mkdir()
    (tmp_path / "node/key").write_text("secret")
    top = tmp_path / "tree"
    (top / "a/deep").mkdir(parents=True)
    (top / "b").mkdir()
    for name in ("a/file", "a/deep/file", "b/file", "file"):
        (top / name).write_text(name)
    (top / "link").symlink_to("../node/key")
    os.mkfifo(top / "fifo")
    return top


def exchanged(top: Path, when: str, what: str, by: str) -> list[str]:
    """Walk; as soon as `when` is found, put a link to `by` in the place of `what`. Return what was read."""
    read = []
    with closing(open_top(top)) as fd:
        for found in walk(fd):
            if stat.S_ISREG(found.status.st_mode):
                read.append(os.pread(found.fd, 100, 0).decode())
            if found.name == when:
                (top / what).rename(top.parent / "away")
                (top / what).symlink_to(by)
    return read


def names(top: Path, **options: object) -> list[str]:
    with closing(open_top(top)) as fd:
        return [found.name for found in walk(fd, **options)]  # type: ignore[arg-type]


def test_directory_comes_before_what_it_has(tree: Path) -> None:
    assert names(tree) == [".", "fifo", "file", "link", "b", "b/file", "a", "a/file", "a/deep", "a/deep/file"]
    assert names(tree, skip={"a", "b/file"}.__contains__) == [".", "fifo", "file", "link", "b"]


@pytest.mark.parametrize("link", ["../node", "a"])
def test_directory_exchanged_for_a_link_ends_the_walk(tree: Path, link: str) -> None:
    with pytest.raises(OSError, match="'b'"):
        exchanged(tree, "file", "b", link)


def test_directory_above_exchanged_for_a_link_ends_the_walk(tree: Path) -> None:
    with pytest.raises(OSError, match="'a/deep'"):
        exchanged(tree, "a/file", "a", "../node")


def test_file_exchanged_for_a_link_is_a_link(tree: Path) -> None:
    assert "secret" not in exchanged(tree, ".", "file", "../node/key")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: socket.socket(socket.AF_UNIX).bind(str(path))])
def test_what_blocks_in_the_place_of_a_file_is_not_opened(tree: Path, make: object) -> None:
    with closing(open_top(tree)) as fd:
        found = walk(fd)
        next(found)  # the top itself: its names have not been read yet
        (tree / "file").unlink()
        make(tree / "file")  # type: ignore[operator]
        kinds = {one.name: stat.S_IFMT(one.status.st_mode) for one in found}
    assert kinds["file"] in (stat.S_IFIFO, stat.S_IFSOCK)


def test_file_exchanged_between_look_and_open_is_the_one_that_was_looked_at(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two calls of the walk, and a program in between."""
    real = beneath.pin

    def pin(directory: int, name: str) -> int:
        fd = real(directory, name)
        if name == "file" and not (tree.parent / "away").exists():
            (tree / "file").rename(tree.parent / "away")
            (tree / "file").symlink_to("../node/key")
        return fd

    monkeypatch.setattr(beneath, "pin", pin)
    assert "secret" not in exchanged(tree, "", "", "")


def test_file_that_is_gone_ends_the_walk(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beneath, "pin", lambda directory, name: os.open("/nowhere", os.O_RDONLY))
    with pytest.raises(OSError, match=r"replaced while the tree was read|gone"):
        names(tree)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (Limits(files=5), "more than 5 files"),
        (Limits(directory_bytes=5), "more than 5 bytes of names"),
        (Limits(name=5), "more than 5 bytes"),
        (Limits(listed_bytes=200), "a directory of more than 1 names"),
    ],
)
def test_tree_beyond_a_limit_ends_the_walk(tree: Path, limits: Limits, words: str) -> None:
    with pytest.raises(OSError, match=words):
        names(tree, limits=limits)


def test_first_names_of_files_that_have_several_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(4):
        (tmp_path / f"a{n}").touch()
        (tmp_path / f"b{n}").hardlink_to(tmp_path / f"a{n}")
    first = FirstNames()
    with closing(open_top(tmp_path)) as top:
        found = [(one.name, first.of(one)) for one in walk(top)]
    assert found == [(".", "."), *((f"a{n}", f"a{n}") for n in range(4)), *((f"b{n}", f"a{n}") for n in range(4))]
    monkeypatch.setattr(beneath, "MOST_LINKED_BYTES", 3 * (beneath.LINKED_ENTRY + 2))
    first = FirstNames()
    with closing(open_top(tmp_path)) as top, pytest.raises(OSError, match="more than 3 files that have several names"):
        [first.of(one) for one in walk(top)]


def test_attributes_are_bounded_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(10):
        try:
            os.setxattr(tmp_path, f"user.{n}", b"x" * 100)
        except OSError as error:
            pytest.skip(f"this filesystem has no attributes: {error}")
    monkeypatch.setattr(beneath, "MOST_ATTRIBUTES", 300)
    read: list[str] = []
    getxattr = os.getxattr
    monkeypatch.setattr(os, "getxattr", lambda place, name: read.append(name) or getxattr(place, name))
    with closing(open_top(tmp_path)) as top, pytest.raises(OSError, match="more than 300 bytes of attributes"):
        [one.attributes() for one in walk(top)]
    assert len(read) == 3


def test_depth_is_bound_by_the_length_of_a_path(tmp_path: Path) -> None:
    """A program can make directories whose path no system call takes."""
    fd = os.open(tmp_path, os.O_RDONLY)
    for _ in range(30):
        os.mkdir("d" * 200, dir_fd=fd)
        fd, outer = os.open("d" * 200, os.O_RDONLY, dir_fd=fd), fd
        os.close(outer)
    os.close(fd)
    with pytest.raises(OSError, match="a path of more than 4096 bytes"):
        names(tmp_path)


def test_walk_ends_by_what_its_check_raises(tree: Path) -> None:
    looks = iter(range(3))

    def check() -> None:
        if next(looks, None) is None:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        names(tree, check=check)


def test_no_descriptor_is_left(tree: Path) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    names(tree)
    with closing(open_top(tree)) as fd:
        left: Iterator[TreeFile] = walk(fd)
        next(left), next(left)
        left.close()  # type: ignore[attr-defined]
    assert set(Path("/proc/self/fd").iterdir()) == before
