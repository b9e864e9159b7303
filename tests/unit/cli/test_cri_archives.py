"""Archives that CRI has written, for the kubelet's checkpoint API and for `crictl checkpoint`: imported and shown."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from kybernate_shim.checkpoint.image.manifest import NAME
from kybernate_shim.checkpoint.image.store import read_image
from kybernate_shim.checkpoint.image.verification import verify
from kybernate_shim.checkpoint.rootfs.diff import NAME as ROOTFS_DIFF
from tests.unit.cli.conftest import Node
from tests.unit.cli.saved_image import save

POD = {"namespace": "shop", "pod": "front", "name": "web"}


def tar(files: Mapping[str, bytes]) -> bytes:
    """Return an archive as containerd writes it: in the order of names, with directories."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        folder = tarfile.TarInfo("checkpoint/")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, content in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


LAYER = tar({"srv/data": b"changed" + bytes(5000)})


def written(place: Path, image: Path, beside: Mapping[str, bytes]) -> Path:
    """Write the archive of an image that CRI has had made, with what CRI itself adds."""
    own = {f"checkpoint/{path.name}": path.read_bytes() for path in image.iterdir()}
    documents = {"config.dump": b"{}", "spec.dump": b"{}", "status.dump": b"{}", "stats-dump": b"", "dump.log": b""}
    archive = place / "checkpoint-front_shop-web-2026-11-26T15:00:00Z.tar"
    archive.write_bytes(tar({**own, "checkpoint/dump.log": b"CRIU's", **documents, **beside}))
    return archive


@pytest.fixture
def archive(node: Node, tmp_path: Path) -> Path:
    save(tmp_path / "made", **POD, rootfs_diff=False)
    return written(tmp_path, tmp_path / "made", {"rootfs-diff.tar": gzip.compress(LAYER)})


@pytest.mark.parametrize("command", ["import", "pull"])
def test_changed_files_that_lie_beside_the_image_become_its_own(node: Node, archive: Path, command: str) -> None:
    done = node.json(command, str(archive), "kept", "--yes", "-n", "shop")
    assert (done["path"], done["source"]) == (str(node.checkpoints / "shop/kept"), str(archive))
    kept = read_image(node.checkpoints / "shop/kept")
    assert kept.manifest.rootfs_diff
    assert (kept.path / ROOTFS_DIFF).read_bytes() == LAYER
    assert not verify(kept.path)
    assert (kept.path / "pages-1.img").read_bytes() == (archive.parent / "made/pages-1.img").read_bytes()
    assert [path.name for path in node.checkpoints.iterdir()] == ["shop"]


def test_layer_without_compression_is_taken_as_it_is(node: Node, tmp_path: Path) -> None:
    save(tmp_path / "made", **POD, rootfs_diff=False)
    archive = written(tmp_path, tmp_path / "made", {"rootfs-diff.tar": LAYER})
    node.json("import", str(archive), "kept", "--yes", "-n", "shop")
    assert (node.checkpoints / "shop/kept" / ROOTFS_DIFF).read_bytes() == LAYER


def test_own_changed_files_are_not_replaced_by_those_beside_the_image(node: Node, tmp_path: Path) -> None:
    save(node.checkpoints / "shop/i", **POD, more={ROOTFS_DIFF: LAYER})
    node.run("export", "shop/i", str(tmp_path / "export.tar"), "--format", "checkpointctl")
    done = node.json("pull", str(tmp_path / "export.tar"), "kept")
    assert done["key"] == read_image(node.checkpoints / "shop/i").manifest.signature.key
    assert (node.checkpoints / "shop/kept" / ROOTFS_DIFF).read_bytes() == LAYER


def test_archive_whose_changed_files_no_signature_covers_is_not_trusted_without_a_person(
    node: Node, archive: Path
) -> None:
    said = node.run("pull", str(archive), "kept", "--yes", status=1).output
    assert "name the namespace whose pods may restore it: --namespace shop" in " ".join(said.split())
    assert not (node.checkpoints / "shop").exists()


def test_archive_needs_a_name(node: Node, archive: Path) -> None:
    assert "give a name after the reference" in node.run("import", str(archive), "--yes", status=4).output


def test_archive_of_another_runtime_is_named_as_such(node: Node, tmp_path: Path) -> None:
    other = tmp_path / "other.tar"
    other.write_bytes(tar({"checkpoint/core-1.img": b"registers", "config.dump": b"{}"}))
    said = node.run("import", str(other), "kept", "--yes", "-n", "shop", status=1).output
    assert f"no checkpoint/{NAME}: it is not an archive of a container of Kybernate's handler" in " ".join(said.split())


@pytest.mark.parametrize("content", [gzip.compress(LAYER)[:-9], b"\x1f\x8b" + bytes(100)], ids=["cut", "damaged"])
def test_damaged_layer_is_refused(node: Node, tmp_path: Path, content: bytes) -> None:
    save(tmp_path / "made", **POD, rootfs_diff=False)
    archive = written(tmp_path, tmp_path / "made", {"rootfs-diff.tar": content})
    assert "a layer" in node.run("import", str(archive), "kept", "--yes", "-n", "shop", status=1).output
    assert list(node.checkpoints.iterdir()) == []


def test_inspect_shows_what_an_import_would_make_and_keeps_nothing(node: Node, archive: Path) -> None:
    found = node.json("inspect", str(archive))
    assert found["path"] == str(archive)
    assert found["manifest"]["rootfs_diff"] is True
    assert found["manifest"]["source"]["pod"] == "front"
    assert found["signature"]["valid"] is False
    assert list(node.checkpoints.iterdir()) == []


def test_inspect_verifies_an_archive(node: Node, archive: Path) -> None:
    content = archive.read_bytes()
    at = content.index(b"registers")
    archive.write_bytes(content[:at] + b"Registers" + content[at + 9 :])
    assert "core-1.img" in node.run("inspect", str(archive), "--verify", status=1).output
