"""What the proof finds missing of an image, one kind of thing after the other."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from kybernate_shim.checkpoint import names
from kybernate_shim.checkpoint.at_rest import unrestorable
from kybernate_shim.checkpoint.criu import images, opened
from kybernate_shim.checkpoint.image.manifest import SAVED_SPEC, File, ImageVolume
from kybernate_shim.checkpoint.names import Name, Names
from kybernate_shim.checkpoint.proof import AnyRoot, evidence, unproven
from kybernate_shim.checkpoint.restorable import SavedRoot
from kybernate_shim.checkpoint.rootfs.diff import NAME as ROOTFS_DIFF
from kybernate_shim.checkpoint.rootfs.overlay import Overlay
from kybernate_shim.messages import criu_pb2 as criu
from kybernate_shim.trust.requester import CONTAINER_TYPE, POD_UID
from tests.unit.checkpoint.criu_files import (
    OTHER_ROOT,
    PRIVATE,
    SAME_ROOT,
    VOLUME,
    container,
    ghost,
    ghost_of,
    linked,
    regular,
    socket,
)
from tests.unit.checkpoint.image.manifests import MINIMAL

LINK = "data/link_remap.9"


@dataclass
class Files:
    """A root filesystem that has certain paths."""

    there: set[str] = field(default_factory=lambda: {"/bin/sh"})

    def lacks(self, path: str) -> str:
        return "" if path in self.there else "is gone"


def missing(directory: Path, *there: str, known: Names | None = None, lost: dict[str, str] | None = None) -> list[str]:
    root = Files({"/bin/sh", *there})
    return [str(one) for one in unproven(evidence(directory, root, known, lost))]


def test_all_that_is_there_is_proven(tmp_path: Path) -> None:
    container(tmp_path, regular(1, "data/f"), regular(2, "x", PRIVATE), regular(3, "y", VOLUME), socket(4, "/run/s"))
    assert missing(tmp_path, "/data/f", "/run") == []


def test_file_of_the_root_filesystem_that_is_not_there_is_named(tmp_path: Path) -> None:
    container(tmp_path, regular(1, "data/f"))
    assert missing(tmp_path) == ["'/data/f' is open, and is gone"]


def test_file_of_a_root_that_a_program_has_made_is_none_of_the_containers(tmp_path: Path) -> None:
    container(tmp_path, regular(1, "f", OTHER_ROOT), regular(2, "g", SAME_ROOT))
    assert missing(tmp_path) == ["'/g' is open, and is gone"]


def test_file_of_a_volume_that_ends_with_its_pod_is_named(tmp_path: Path) -> None:
    container(tmp_path, regular(1, "volume/f", VOLUME))
    assert missing(tmp_path, lost={"/volume": "ends"}) == ["'/volume/f' is open, and ends"]


def test_file_without_a_name_needs_its_content(tmp_path: Path) -> None:
    container(tmp_path, regular(1, "f"), remaps=[ghost(1, 26)])
    assert missing(tmp_path) == ["'/f' was removed while it was open, and its content is not in the image"]
    ghost_of(tmp_path, 26, 0o100644)
    assert (tmp_path / "ghost-file-1a.img").exists()
    assert missing(tmp_path) == []


def test_file_with_another_name_needs_that_name(tmp_path: Path) -> None:
    container(tmp_path, regular(1, "data/f"), regular(9, LINK), remaps=[linked(1, 9)])
    assert missing(tmp_path) == ["'/data/f' was removed while it was open, and its other name is not in the image"]
    known = Names(links=(Name(f"/{LINK}", "/data/other"),))
    assert missing(tmp_path, "/data/other", known=known) == []
    (why,) = missing(tmp_path, known=known)
    assert why == "'/data/other' is open under the name '/data/f', which was removed, and is gone"


def test_link_of_crius_that_was_saved_is_as_good_as_another_name(tmp_path: Path) -> None:
    container(tmp_path, regular(1, "data/f"), regular(9, LINK), remaps=[linked(1, 9)])
    assert missing(tmp_path, f"/{LINK}") == []


def test_link_in_a_filesystem_of_the_image_is_in_the_image(tmp_path: Path) -> None:
    container(tmp_path, regular(1, "f", PRIVATE), regular(9, "link_remap.9", PRIVATE), remaps=[linked(1, 9)])
    assert missing(tmp_path) == []


def test_program_must_be_a_file_with_a_path(tmp_path: Path) -> None:
    container(tmp_path, program=55)
    (why,) = missing(tmp_path)
    assert why.startswith("'the program of process 1' is not a file with a path")


@pytest.mark.parametrize(
    ("one", "bound"),
    [
        (socket(1, "/run/s"), True),
        (socket(1, "/run/s", deleted=True), False),
        (socket(1, "/run/s", state=opened.ESTABLISHED), False),
        (socket(1, "\0abstract"), False),
        (socket(1, ""), False),
    ],
)
def test_directory_of_a_socket_must_be_there(tmp_path: Path, one: criu.File, bound: bool) -> None:
    container(tmp_path, one)
    text = "'/run/s' has a UNIX socket bound to it, and its directory is gone"
    assert missing(tmp_path) == ([text] if bound else [])
    made = Names(sockets=(Name("/run/s", "/srv/s", "/", "/run"),))
    assert missing(tmp_path, known=made) == []


def test_content_of_a_filesystem_in_memory_must_be_there(tmp_path: Path) -> None:
    (container(tmp_path) / "tmpfs-dev-7.tar.gz.img").unlink()
    assert missing(tmp_path) == ["'/dev/shm' is a filesystem in memory, and its content is not in the image"]


# -- what CRIU's files are made to say --------------------------------------------------------------------------------


def test_deleted_directories_are_removed_before_those_around_them(tmp_path: Path) -> None:
    files = [regular(1, "job"), regular(2, "job/a/b/c"), regular(3, "job/f"), regular(4, "x")]
    container(tmp_path, *files, regular(9, LINK), remaps=[ghost(1, 1), ghost(2, 2), ghost(3, 3), linked(4, 9)])
    for number, mode in ((1, 0o040755), (2, 0o040700), (3, 0o100600)):
        ghost_of(tmp_path, number, mode)
    opened.order_removals(tmp_path, opened.opened(tmp_path), lambda path: False)
    after = opened.opened(tmp_path)
    assert after.paths[2].path == "/job/a.b.c.2"  # what CRIU would make on the way there, it would not remove
    assert [one.file for one in after.remaps] == [2, 3, 1, 4]
    assert after.remaps[3].kind == criu.Remap.LINKED
    assert after.remaps[3].HasField("kind")


def test_order_stays_where_no_directory_was_deleted(tmp_path: Path) -> None:
    container(tmp_path, regular(1, "f"), regular(2, "a/b/f"), remaps=[ghost(1, 1), ghost(2, 2)])
    for number in (1, 2):
        ghost_of(tmp_path, number, 0o100600)
    before = (tmp_path / opened.REMAP_FILE).stat()
    opened.order_removals(tmp_path, opened.opened(tmp_path), lambda path: False)
    assert (tmp_path / opened.REMAP_FILE).stat() == before


def test_sizes_are_forgotten_of_what_is_appended_to_on_volumes_alone(tmp_path: Path) -> None:
    appended = 0o2002
    files = [
        regular(1, "volume/log", VOLUME, flags=appended, size=4),
        regular(2, "volume/data", VOLUME, flags=2, size=4),
        regular(3, "log", flags=appended, size=4),
        regular(4, "volume/flags", VOLUME, flags=0, size=0),
    ]
    container(tmp_path, *files)
    opened.forget_sizes(tmp_path, evidence(tmp_path, AnyRoot()).mounts.values())
    found = {entry.id: entry.regular for entry in images.entries(tmp_path / "files.img", images.FILES, criu.File)}
    assert [found[number].HasField("size") for number in (1, 2, 3, 4)] == [False, True, True, True]
    assert found[4].HasField("flags")  # 0 is a value that CRIU wants to see


# -- what a restore sees ----------------------------------------------------------------------------------------------


@pytest.fixture
def overlay(tmp_path: Path) -> Overlay:
    for path in ("upper/changed", "lower/image", "lower/d/f", "below/d/hidden", "below/e/f"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x")
    (tmp_path / "lower/e").write_text("a file over a directory")
    return Overlay(tmp_path / "upper", lower=(tmp_path / "lower", tmp_path / "below"))


@pytest.mark.parametrize(
    ("path", "found"),
    [
        *((path, True) for path in ("/", "/changed", "/image", "/d/f", "/d/hidden")),
        *((path, False) for path in ("/e/f", "/none", "/d/none")),
    ],
)
def test_root_filesystem_is_that_of_the_layers(overlay: Overlay, path: str, found: bool) -> None:
    assert (SavedRoot(overlay, saved=True).lacks(path) == "") == found


def test_changed_files_count_only_where_they_are_saved(overlay: Overlay) -> None:
    assert "which are not in the image" in SavedRoot(overlay, saved=False).lacks("/changed")
    assert SavedRoot(overlay, saved=False).lacks("/image") == ""
    (overlay.upper / "d").mkdir()
    assert SavedRoot(overlay, saved=False).lacks("/d") == ""  # a directory of the image, in which something has changed
    (overlay.upper / "run/secrets").mkdir(parents=True)
    assert SavedRoot(overlay, saved=False).lacks("/run") != ""
    assert SavedRoot(overlay, saved=False, hidden=["/run/secrets/token"]).lacks("/run") == ""
    assert "below the mount at '/changed'" in SavedRoot(overlay, saved=True, hidden=["/changed"]).lacks("/changed")


def diff(path: Path, *entries: str) -> None:
    with tarfile.open(path, "w") as tar:
        for name in entries:
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())


def at_rest(directory: Path, *listed: str) -> list[str]:
    manifest = replace(MINIMAL, files=tuple(File(name, 0, "xxh128:0") for name in listed))
    return [problem.detail for problem in unrestorable(directory, manifest)]


def test_image_at_rest_is_proven_by_its_changed_files(tmp_path: Path) -> None:
    """What they delete is not there; of the rest, the container image is taken to have it."""
    container(tmp_path, regular(1, "data/f"), regular(2, "gone/f"), regular(3, "new/f"), regular(4, "again"))
    diff(tmp_path / ROOTFS_DIFF, "data", ".wh.gone", "new", "new/.wh..wh..opq", "new/f", ".wh.again", "again")
    (text,) = at_rest(tmp_path, ROOTFS_DIFF)
    assert text == "'/gone/f' is open, and was deleted, by the changed files of the image"


def test_emptied_directory_has_nothing_of_the_image_any_more(tmp_path: Path) -> None:
    container(tmp_path, regular(1, "d/old"), regular(2, "d/new"))
    diff(tmp_path / ROOTFS_DIFF, "d", "d/.wh..wh..opq", "d/new")
    (text,) = at_rest(tmp_path, ROOTFS_DIFF)
    assert text.startswith("'/d/old' is open")


def test_damaged_files_are_a_problem_and_no_error(tmp_path: Path) -> None:
    container(tmp_path, regular(1, "f"))
    (tmp_path / names.FILE).write_text("{")
    assert names.FILE in at_rest(tmp_path, names.FILE)[0]
    (tmp_path / "files.img").unlink()
    assert "files.img" in at_rest(tmp_path)[0]


def test_file_of_a_volume_whose_content_was_left_is_a_problem_at_rest(tmp_path: Path) -> None:
    container(tmp_path, regular(1, "volume/f", VOLUME))
    source = "/var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/data"
    spec = {
        "annotations": {CONTAINER_TYPE: "container", POD_UID: "u"},
        "mounts": [{"destination": "/volume", "type": "bind", "source": source}],
    }
    (tmp_path / SAVED_SPEC).write_text(json.dumps(spec))
    (text,) = at_rest(tmp_path, SAVED_SPEC)
    assert "lies in the pod's volume data, whose content is not in the image" in text
    saved = ImageVolume("v.tar", "data", "empty-dir", ("/volume",), 1, 1)
    whole = replace(MINIMAL, files=(File(SAVED_SPEC, 0, "xxh128:0"),), volumes=(saved,))
    assert unrestorable(tmp_path, whole) == []
