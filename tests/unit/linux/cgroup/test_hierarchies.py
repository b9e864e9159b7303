"""Where a cgroup's directory is, for every way in which hosts and containers mount the hierarchies."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.linux.cgroup.hierarchies import beneath, hierarchy_mounts, locate, parse_names
from kybernate_shim.linux.mount.mountinfo import MountPoint, parse_line

HYBRID = """\
12:cpu,cpuacct:/kubepods/pod1/abc
5:memory:/kubepods/pod1/abc
1:name=systemd:/a:b
0::/system.slice/containerd.service
"""


def mounted(path: Path | str, root: str = "/", kind: str = "cgroup2", options: str = "rw") -> MountPoint:
    return parse_line(f"30 1 0:9 {root} {path} rw - {kind} none {options}".encode())


def test_names_by_controller() -> None:
    assert parse_names(HYBRID) == {
        "cpu": "/kubepods/pod1/abc",
        "cpuacct": "/kubepods/pod1/abc",
        "memory": "/kubepods/pod1/abc",
        "name=systemd": "/a:b",
        "": "/system.slice/containerd.service",
    }


def test_name_of_a_removed_cgroup_has_no_mark() -> None:
    assert parse_names("0::/gone (deleted)\n") == {"": "/gone"}


@pytest.mark.parametrize(
    ("root", "name", "inner"),
    [
        ("/", "/", "."),
        ("/", "/kubepods/x", "kubepods/x"),
        ("/docker/1", "/docker/1/inner", "inner"),  # Docker in Docker: a part is mounted, without a namespace
        ("/docker/1", "/docker/12", None),
        ("/..", "/../other", "other"),  # the mount shows the parent of our namespace's root
        ("/../..", "/../other", None),  # the directory in between has no name for us
        ("/", "/../other", None),
        ("/..", "/mine", None),
    ],
)
def test_name_below_a_mounts_root(root: str, name: str, inner: str | None) -> None:
    assert beneath(root, name) == inner


COMPONENTS = st.lists(st.from_regex(r"[a-z0-9_.-]{1,8}", fullmatch=True).filter(lambda part: part not in (".", "..")))


@given(COMPONENTS, COMPONENTS)
def test_what_is_below_a_root_is_found_there(top: list[str], rest: list[str]) -> None:
    root = "/" + "/".join(top)
    assert beneath(root, "/" + "/".join(top + rest)) == ("/".join(rest) or ".")


def test_hierarchies_are_known_by_their_controllers(tmp_path: Path) -> None:
    mounts = hierarchy_mounts(
        [
            mounted("/c/cpu", kind="cgroup", options="rw,cpu,cpuacct"),
            mounted("/c/part", "/docker/1", kind="cgroup", options="rw,memory"),
            mounted("/c/memory", kind="cgroup", options="rw,memory"),
            mounted("/c/unified"),
            mounted("/tmp", kind="tmpfs", options="rw,memory"),
        ]
    )
    assert [str(mount.path) for mount in mounts["memory"]] == ["/c/memory", "/c/part"]
    assert mounts["cpu"] == mounts["cpuacct"]
    assert [str(mount.path) for mount in mounts[""]] == ["/c/unified"]


def test_mount_that_has_the_directory_is_preferred(tmp_path: Path) -> None:
    (tmp_path / "second" / "x").mkdir(parents=True)
    mounts = [mounted(tmp_path / "first"), mounted(tmp_path / "second")]
    assert locate(mounts, "/x", 1) == tmp_path / "second" / "x"
    assert locate(mounts, "/y", 1) == tmp_path / "first" / "y"
    assert locate([], "/x", 1) is None


def test_cgroup_is_searched_where_its_upper_directories_have_no_name(tmp_path: Path) -> None:
    for directory, pids in {"a/x": "7\n8\n", "b/x": "9\n", "b/y": "8\n"}.items():
        (tmp_path / directory).mkdir(parents=True)
        (tmp_path / directory / "cgroup.procs").write_text(pids)
    assert locate([mounted(tmp_path, "/..")], "/x", 9) == tmp_path / "b" / "x"
    assert locate([mounted(tmp_path, "/..")], "/x", 10) is None


@pytest.mark.parametrize("end", ["\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\r"])
def test_name_of_a_cgroup_ends_no_line(end: str) -> None:
    below = f"/kubepods/own/x{end}0::/kubepods/others"
    assert parse_names(f"0::{below}\n") == {"": below}


def test_name_of_a_cgroup_is_any_bytes() -> None:
    assert parse_names("0::/a\udcff\n") == {"": "/a\udcff"}
