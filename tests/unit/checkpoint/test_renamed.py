"""Which names of UNIX sockets and removed files a restore must make, as the dump finds them."""

from __future__ import annotations

import os
import socket
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from kybernate_shim.checkpoint import renamed
from kybernate_shim.checkpoint.criu.images import DumpedMount
from kybernate_shim.checkpoint.criu.opened import OpenedPath
from kybernate_shim.checkpoint.names import Name
from kybernate_shim.checkpoint.proof import ImageEvidence, evidence, unproven
from kybernate_shim.checkpoint.restorable import SavedRoot, _without_links
from kybernate_shim.checkpoint.rootfs.overlay import Overlay
from kybernate_shim.checkpoint.sockets import Socket
from kybernate_shim.linux.find_inodes import real_path, root_of
from kybernate_shim.messages import criu_pb2 as criu
from tests.unit.checkpoint.criu_files import container
from tests.unit.checkpoint.criu_files import socket as socket_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root/var").mkdir(parents=True)
    (tmp_path / "root/run/app").mkdir(parents=True)
    (tmp_path / "root/var/run").symlink_to("../run")
    return tmp_path / "root"


@pytest.fixture
def found(tmp_path: Path) -> ImageEvidence:
    (tmp_path / "image").mkdir()
    root = SavedRoot(Overlay(tmp_path, lower=(tmp_path / "root",)), saved=True)
    return evidence(container(tmp_path / "image"), root)


def names_of(bound: Path, at: Path, found: ImageEvidence, monkeypatch: pytest.MonkeyPatch) -> renamed.Found:
    """Return what is found of a socket that was bound to one path, and whose file is at another one."""
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(at))
    monkeypatch.setattr(renamed, "file_of", lambda one: (str(at), 1, at.stat()))
    listening = Socket("unix", "listening", str(bound), is_file=True, holder=(os.getpid(), 0))
    return renamed.find(found, [listening], [], os.getpid())


def test_socket_bound_through_a_link_was_not_renamed(
    root: Path, found: ImageEvidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = names_of(root / "var/run/app/s", root / "run/app/s", found, monkeypatch)
    assert (one.sockets, one.problems) == ([], [])


def test_links_on_the_way_to_a_socket_are_no_missing_directories(root: Path, tmp_path: Path) -> None:
    layers = SavedRoot(Overlay(tmp_path / "upper", lower=(Path("/"),)), saved=True)
    found = evidence(container(tmp_path, socket_of(9, f"{root}/var/run/app/s")), layers)
    assert any("has a UNIX socket bound to it" in str(one) for one in unproven(found))
    with root_of(os.getpid()) as top:
        found = replace(found, opened=_without_links(found.opened, top))
    assert not [one for one in unproven(found) if "socket" in str(one)]


def test_renamed_socket_has_no_link_in_its_names(
    root: Path, found: ImageEvidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore follows none."""
    one = names_of(root / "var/run/app/new", root / "run/app/s", found, monkeypatch)
    assert one.sockets == [Name(str(root / "run/app/new"), str(root / "run/app/s"))]
    one = names_of(root / "var/run/gone/new", root / "run/app/t", found, monkeypatch)
    assert one.sockets == [Name(str(root / "run/gone/new"), str(root / "run/app/t"), "/", str(root / "run/gone"))]


@pytest.mark.parametrize("path", ["var/run/app/s", "/var/run/app/../app/s", "var/../var/run/app/s"])
def test_real_path_follows_links_but_the_last(root: Path, path: str) -> None:
    (root / "run/app/s").symlink_to("/elsewhere")
    with root_of(os.getpid()) as top:
        assert real_path(top, f"{root}/{path}") == f"{root}/run/app/s"


def test_real_path_keeps_what_is_not_there(root: Path) -> None:
    with root_of(os.getpid()) as top:
        assert real_path(top, f"{root}/var/run/a/b/s") == f"{root}/run/a/b/s"
        assert real_path(top, "//nowhere/s") == "/nowhere/s"


def test_links_of_the_container_lead_to_no_file_of_the_node(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "upper").mkdir()
    (tmp_path / "upper/away").symlink_to(tmp_path)
    assert Overlay(tmp_path / "upper").has_changed(["away"])
    assert not Overlay(tmp_path / "upper").has_changed(["away", "node"])


@pytest.mark.parametrize("configured", [True, False], ids=["of config.json", "of a hook"])
def test_removed_file_is_named_where_a_restore_could_make_no_link(
    root: Path, found: ImageEvidence, monkeypatch: pytest.MonkeyPatch, configured: bool
) -> None:
    file = root / "run/app/file"
    file.touch()
    (root / "run/app/other").hardlink_to(file)
    mount = DumpedMount(str(root / "run"), "ext4", str(root / "run"), id=9, parent=1)
    opened = replace(found.opened, paths={1: OpenedPath(str(file), 9), 2: OpenedPath(f"{root}/run/link_remap.1", 9)})
    remap = criu.Remap(file=1, target=2, kind=criu.Remap.LINKED)
    evidence = replace(found, opened=replace(opened, remaps=[remap]), mounts={9: mount})
    with file.open() as held:
        file.unlink()
        monkeypatch.setattr(renamed, "root_of", lambda pid, where: nullcontext(os.open(where, os.O_RDONLY)))
        one = renamed.find(evidence, [], [os.getpid()], os.getpid(), [mount.destination] if configured else [])
        assert held.fileno() >= 0
    if configured:
        assert [link.other for link in one.links] == [str(root / "run/app/other")]
    else:
        assert one.links == []
        assert "which a hook or a recursive bind mount has made" in one.problems[0]
