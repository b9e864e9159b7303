"""Names that a restore makes: only below the mount that they are of, whatever the image says and others put there."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kybernate_shim.checkpoint import names
from kybernate_shim.checkpoint.image.store import CheckpointInvalid
from kybernate_shim.checkpoint.mounts.configured import SpecMounts
from kybernate_shim.checkpoint.names import Name, Names
from kybernate_shim.errors import HeldFailed
from kybernate_shim.oci.spec import Spec

SPEC = Spec({})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "data").mkdir(parents=True)
    (root / "data/other").write_text("kept")
    return root


def test_link_is_the_file_under_another_name(root: Path) -> None:
    wanted = Names(links=(Name("/data/link_remap.1", "/data/other"),))
    for _ in range(2):  # an earlier attempt may have made it
        names.make_links(wanted, SpecMounts.of(SPEC, root), root)
    assert (root / "data/link_remap.1").samefile(root / "data/other")


def test_link_is_made_in_the_volume_of_the_new_container(root: Path, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "a").write_text("kept")
    spec = Spec({"mounts": [{"destination": "/vol", "type": "bind", "source": str(volume)}]})
    names.make_links(Names(links=(Name("/vol/link_remap.1", "/vol/a", "/vol"),)), SpecMounts.of(spec, root), root)
    assert (volume / "link_remap.1").read_text() == "kept"
    with pytest.raises(HeldFailed, match="no such mount"):
        names.make_links(Names(links=(Name("/vol/link_remap.1", "/vol/a", "/vol"),)), SpecMounts.of(SPEC, root), root)


def test_volume_is_found_behind_the_links_on_the_way_to_it(root: Path, tmp_path: Path) -> None:
    (root / "var").mkdir()
    (root / "var/run").symlink_to("/run")
    (tmp_path / "a").write_text("kept")
    spec = Spec({"mounts": [{"destination": "/var/run/vol", "type": "bind", "source": str(tmp_path)}]})
    wanted = Names(links=(Name("/run/vol/link_remap.1", "/run/vol/a", "/run/vol"),))
    names.make_links(wanted, SpecMounts.of(spec, root), root)
    assert (tmp_path / "link_remap.1").samefile(tmp_path / "a")


def test_volume_is_where_the_links_of_the_dumped_image_led(root: Path, tmp_path: Path) -> None:
    (root / "var/run").mkdir(parents=True)  # no link in the new image
    (tmp_path / "a").write_text("kept")
    spec = Spec({"mounts": [{"destination": "/var/run/vol", "type": "bind", "source": str(tmp_path)}]})
    mounts = SpecMounts.of(spec, root, {"/var/run/vol": "/run/vol"})
    names.make_links(Names(links=(Name("/run/vol/link_remap.1", "/run/vol/a", "/run/vol"),)), mounts, root)
    assert (tmp_path / "link_remap.1").samefile(tmp_path / "a")


@pytest.mark.parametrize("where", ["other", "path"])
def test_links_on_the_way_are_not_followed(root: Path, tmp_path: Path, where: str) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/key").write_text("secret")
    (root / "away").symlink_to(tmp_path / "outside")
    one = Name("/data/l", "/away/key") if where == "other" else Name("/away/l", "/data/other")
    with pytest.raises(HeldFailed, match="cannot be made a name of"):
        names.make_links(Names(links=(one,)), SpecMounts.of(SPEC, root), root)
    assert not (root / "data/l").exists()
    assert not (tmp_path / "outside/l").exists()


def test_file_that_is_not_there_any_more_is_named(root: Path) -> None:
    with pytest.raises(HeldFailed, match=r"/data/link_remap.1 cannot be made a name of /data/gone"):
        names.make_links(Names(links=(Name("/data/link_remap.1", "/data/gone"),)), SpecMounts.of(SPEC, root), root)


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def test_sockets_move_and_the_directories_made_for_them_go(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    wanted = Names(sockets=(Name("/a/b/s", "/data/s", "/", "/a"), Name("/data/t", "/data/u")))
    names.make_directories(wanted, SpecMounts.of(SPEC, root), root)
    bound(Path("a/b/s"))
    bound(Path("data/t"))
    names.move_sockets(wanted, root)
    assert [path.name for path in root.iterdir()] == ["data"]
    assert sorted(path.name for path in (root / "data").iterdir()) == ["other", "s", "u"]


def test_only_a_socket_is_moved(root: Path) -> None:
    with pytest.raises(FileNotFoundError, match="bound no socket"):
        names.move_sockets(Names(sockets=(Name("/data/other", "/data/s"),)), root)


def test_names_are_read_as_they_were_written(tmp_path: Path) -> None:
    wanted = Names((Name("/a\udcff", "/b"),), (Name("/c/d", "/e", "/", "/c"),))
    names.write(tmp_path, wanted)
    assert names.read(tmp_path) == wanted
    (tmp_path / names.FILE).unlink()
    names.write(tmp_path, Names())
    assert not (tmp_path / names.FILE).exists()
    assert names.read(tmp_path) == Names()


@pytest.mark.parametrize(
    "one",
    [
        Name("/a/../b", "/c"),
        Name("/a", "c"),
        Name("/a", "/c", "/vol"),
        Name("/volume", "/vol/c", "/vol"),
        Name("/a/b", "/c", "/", "/other"),
        Name("/a", "/c", "vol"),
    ],
)
def test_names_that_no_dump_writes_are_refused(tmp_path: Path, one: Name) -> None:
    names.write(tmp_path, Names(links=(one,)))
    with pytest.raises(CheckpointInvalid, match="are not such paths"):
        names.read(tmp_path)
