"""mountinfo: its fields and escapes, and the order in which a tree is unmounted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.linux.mount.mountinfo import MountPoint, below, mount_at, parse_line, read_mountinfo, unescape

LINE = rb"36 35 98:0 /a\040b /mnt/c\134d rw,noatime shared:7 master:1 - overlay none rw,lowerdir=/x\054y:/z,index=off"
ESCAPED = b" \t\n\\#"


def kernel_escape(raw: bytes) -> bytes:
    return b"".join(
        b"\\%03o" % byte if bytes([byte]) in [bytes([e]) for e in ESCAPED] else bytes([byte]) for byte in raw
    )


def point(id_: int, path: str) -> MountPoint:
    return parse_line(b"%d 1 0:1 / %s rw - tmpfs t rw" % (id_, path.encode()))


def test_line_has_all_fields() -> None:
    mount = parse_line(LINE)
    assert (mount.id, mount.parent, mount.device, mount.root, mount.path) == (36, 35, "98:0", "/a b", Path("/mnt/c\\d"))
    assert (mount.options, mount.propagation) == (("rw", "noatime"), ("shared:7", "master:1"))
    assert (mount.type, mount.source) == ("overlay", "none")
    assert mount.super_options == ("rw", "lowerdir=/x,y:/z", "index=off")


def test_line_without_optional_fields_and_with_an_empty_source() -> None:
    mount = parse_line(b"36 35 0:9 / / rw - tmpfs  rw,size=1k")
    assert (mount.propagation, mount.source, mount.super_options) == ((), "", ("rw", "size=1k"))


@given(st.binary())
def test_unescape_undoes_the_kernels_escapes(raw: bytes) -> None:
    assert os.fsencode(unescape(kernel_escape(raw))) == raw


@given(st.lists(st.binary(min_size=1).filter(lambda raw: b"\0" not in raw and b"/" not in raw), min_size=1))
def test_any_path_survives_a_line(names: list[bytes]) -> None:
    path = b"/" + b"/".join(name for name in names if name not in (b".", b".."))
    mount = parse_line(b"36 35 0:9 / " + kernel_escape(path) + b" rw shared:1 - tmpfs none rw")
    assert mount.path == Path(os.fsdecode(path))


def test_deepest_comes_first_and_the_topmost_of_a_stack_before_the_others() -> None:
    mounts = [point(1, "/r"), point(2, "/r/a"), point(3, "/r/a/b"), point(4, "/r/a"), point(5, "/rest"), point(6, "/")]
    assert [mount.id for mount in below(Path("/r"), mounts)] == [3, 4, 2, 1]


def test_path_is_resolved_but_for_its_last_name(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    mounts = [point(1, f"{tmp_path.resolve()}/real/rootfs"), point(2, f"{tmp_path.resolve()}/real")]
    assert [mount.id for mount in below(tmp_path / "link" / "rootfs", mounts)] == [1]
    assert below(tmp_path / "link", mounts) == []


def test_own_mounts_have_a_root_and_proc() -> None:
    types = {str(mount.path): mount.type for mount in read_mountinfo()}
    assert "/" in types
    assert types["/proc"] == "proc"


def test_mount_of_a_directory_is_the_nearest_one() -> None:
    found = mount_at(Path("/proc/self/fd"))
    assert found is not None
    assert (found.path, found.type) == (Path("/proc"), "proc")
    with pytest.raises(FileNotFoundError):
        mount_at(Path("/nowhere"))
