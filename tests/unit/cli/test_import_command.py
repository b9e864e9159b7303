"""`kybernate import`: what is shown, what is asked, what is signed, and what a changing or hostile source can do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kybernate.cli import asking
from kybernate.node import importing
from kybernate_shim.checkpoint.image.manifest import NAME, File, Manifest, encode
from kybernate_shim.checkpoint.image.store import read_image
from kybernate_shim.checkpoint.image.verification import verify
from kybernate_shim.trust.keys import Key
from kybernate_shim.vram_io import digest as vram_digest
from kybernate_shim.vram_io.image_files import VramFile
from tests.unit.cli.conftest import Node
from tests.unit.cli.saved_image import SPEC, save

POD = {"namespace": "shop", "pod": "front", "name": "web"}
PRIVILEGED: dict[str, Any] = {
    "process": {"user": {"uid": 0, "gid": 0}, "capabilities": {"effective": ["CAP_SYS_ADMIN", "CAP_CHOWN"]}},
    "mounts": [
        {"destination": "/host", "source": "/", "type": "bind", "options": ["rbind", "rw"]},
        {"destination": "/proc", "source": "proc", "type": "proc"},
    ],
    "hooks": {"createRuntime": [{"path": "/bin/sh", "args": ["sh", "-c", "id"]}]},
    "linux": {"devices": [{"path": "/dev/nvidia0"}], "resources": {"devices": [{"allow": True, "access": "rwm"}]}},
}


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A place for images that are not this node's."""
    return tmp_path / "usb" / "i"


def manifest_of(image: Path) -> Manifest:
    return read_image(image).manifest


def listed(node: Node) -> dict[str, bool]:
    return {one["path"]: one["usable"] for one in node.json("images", "--all")}


def test_image_is_signed_and_put_into_the_directory_of_its_namespace(node: Node, foreign: Path) -> None:
    save(foreign, signed=False, digest="xxh128")
    assert node.json("import", str(foreign), "--yes", "-n", "shop")["namespace"] == "shop"
    target = node.checkpoints / "shop" / "i"
    manifest = manifest_of(target)
    assert manifest.source.namespace == "shop"
    assert not verify(target)
    assert all(file.digest.startswith("blake3:") for file in manifest.files)
    assert {path.name: path.stat().st_mode & 0o7777 for path in target.iterdir()} == dict.fromkeys(
        [NAME, *(file.name for file in manifest.files)], 0o600
    )
    assert target.stat().st_mode & 0o7777 == target.parent.stat().st_mode & 0o7777 == 0o700
    assert listed(node) == {str(target): True}
    assert foreign.is_dir()
    assert not verify(foreign)


def test_image_without_a_pod_stays_roots_own(node: Node, foreign: Path) -> None:
    save(foreign, signed=False)
    assert node.json("import", str(foreign), "new", "--yes")["namespace"] == ""
    assert listed(node) == {str(node.checkpoints / "new"): True}


def test_everything_is_shown_before_the_question(node: Node, foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(foreign, spec=PRIVILEGED, signed=False, **POD)
    monkeypatch.setattr(asking, "is_terminal", lambda: True)
    result = node.run("import", str(foreign), status=4)
    for words in (
        "pod:             shop/front/web",
        "signed by:       the image is not signed",
        f"goes to:         {node.checkpoints}/shop/i",
        "for:             pods of namespace shop, and root",
        "  7     helper   2.00 MiB",
        "  user                  uid 0, gid 0",
        "  capabilities          CAP_CHOWN, CAP_SYS_ADMIN",
        "  no_new_privs          no",
        "  seccomp               none",
        "  devices               /dev/nvidia0",
        "  createRuntime: /bin/sh -c id",
        "  /host         /           rw       bind",
        "  /data         /srv/data   rw       host",
        "  GPU-1   NVIDIA H200",
    ):
        assert words in result.stdout.splitlines(), f"{words!r} is not in\n{result.stdout}"
    for words in ("CAP_SYS_ADMIN", "every device of the node", "no seccomp profile", "hooks: programs of the node"):
        assert words in next(line for line in result.stdout.splitlines() if line.startswith("  unusual"))
    assert "nothing was imported" in result.stderr
    assert not node.checkpoints.exists()


@pytest.mark.parametrize(("answer", "status"), [("y\n", 0), ("n\n", 4), ("\n", 4), ("", 4)])
def test_the_answer_is_no_unless_it_is_yes(
    node: Node, foreign: Path, monkeypatch: pytest.MonkeyPatch, answer: str, status: int
) -> None:
    save(foreign, signed=False)
    monkeypatch.setattr(asking, "is_terminal", lambda: True)
    node.run("import", str(foreign), status=status, input=answer)
    assert (node.checkpoints / "i").exists() == (status == 0)


def test_without_a_terminal_nothing_is_asked_and_nothing_imported(node: Node, foreign: Path) -> None:
    save(foreign, signed=False)
    result = node.run("import", str(foreign), status=4, input="y\n")
    assert "stdin is not a terminal" in result.stderr
    assert "--yes" in result.stderr
    assert not node.checkpoints.exists()


def test_scripts_name_the_namespace_that_an_unsigned_image_claims(node: Node, foreign: Path) -> None:
    save(foreign, signed=False, **POD)
    assert "--namespace shop" in node.run("import", str(foreign), "--yes", status=1).stderr
    assert not node.checkpoints.exists()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path) -> None:
    path.rename(path.parent.parent / "pages")
    path.symlink_to(path.parent.parent / "pages")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip, "pages-1.img: digest"),
        (Path.unlink, "pages-1.img is missing"),
        (fifo, "not a regular file: 'pages-1.img'"),
        (link, "not a regular file: 'pages-1.img'"),
        (lambda path: path.write_bytes(b"x"), "pages-1.img: shorter"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "pages-1.img: longer"),
        (lambda path: (path.parent / "evil.img").touch(), "evil.img"),
        (lambda path: (path.parent / "directory").mkdir(), "directory"),
        (lambda path: fifo(path.parent / NAME), "not a regular file"),
        (lambda path: (path.parent / NAME).write_text("[" * 100_000), ""),
        (lambda path: os.truncate(path.parent / NAME, 1 << 40), "larger than"),
    ],
)
def test_image_that_is_not_whole_is_refused(
    node: Node, foreign: Path, damage: Callable[[Path], object], reason: str
) -> None:
    save(foreign, signed=False)
    damage(foreign / "pages-1.img")
    assert reason in node.run("import", str(foreign), "--yes", status=1).stderr
    assert not node.checkpoints.exists()


@pytest.mark.parametrize("spec", [[], {"annotations": ["io.kubernetes.cri."]}, {"process": 5}, {"mounts": [1]}])
def test_configuration_of_odd_form_is_refused(node: Node, foreign: Path, spec: Any) -> None:
    save(foreign, spec=spec, signed=False)
    result = node.run("import", str(foreign), "--yes", "--json", status=1)
    assert "OCI" in result.stderr
    assert not node.checkpoints.exists()


@pytest.mark.parametrize("file", ["pages-1.img", "kybernate-spec.json"])
def test_file_that_changes_after_it_was_examined_is_found(
    node: Node, foreign: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """The author of the source writes to it while the administrator reads what the image asks for."""
    save(foreign, signed=False)

    def agree(question: str, **_: object) -> None:
        content = bytearray((foreign / file).read_bytes())
        content[-3] ^= 1
        (foreign / file).write_bytes(content)

    monkeypatch.setattr("kybernate.cli.bringing_in.require_agreement", agree)
    foreign.chmod(0o777)
    result = node.run("import", str(foreign), status=1)
    assert "changed after it was examined" in result.stderr
    assert file in result.stderr
    assert listed(node) == {}


def test_manifest_that_changes_after_it_was_examined_has_no_effect(
    node: Node, foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(foreign, signed=False)
    manifest = foreign / NAME
    changed = manifest.read_text().replace("/srv/data", "/")
    monkeypatch.setattr("kybernate.cli.bringing_in.require_agreement", lambda *_, **__: manifest.write_text(changed))
    node.run("import", str(foreign))
    assert manifest_of(node.checkpoints / "i").mounts[1].source == "/srv/data"


def test_failure_leaves_nothing(node: Node, foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(foreign, signed=False)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(importing, "write_manifest", full)
    assert "No space left" in node.run("import", str(foreign), "--yes", status=1).stderr
    assert list(node.checkpoints.iterdir()) == []


def test_moved_image_leaves_nothing_behind(node: Node, foreign: Path) -> None:
    save(foreign, signed=False)
    inode = (foreign / "pages-1.img").stat().st_ino
    node.run("import", str(foreign), "--yes", "--move")
    assert not foreign.exists()
    assert (node.checkpoints / "i" / "pages-1.img").stat().st_ino == inode
    assert listed(node) == {str(node.checkpoints / "i"): True}


def test_image_that_others_could_change_is_copied_even_when_it_is_moved(node: Node, foreign: Path) -> None:
    """They may have its files open for writing, and would keep them so after a rename."""
    save(foreign, signed=False)
    (foreign / "pages-1.img").chmod(0o666)
    with (foreign / "pages-1.img").open("r+b") as theirs:
        node.run("import", str(foreign), "--yes", "--move")
        theirs.write(b"evil")
    assert not foreign.exists()
    assert not verify(node.checkpoints / "i")


def test_image_in_no_namespaces_directory_moves_to_its_own(node: Node) -> None:
    save(node.checkpoints / "i", signed=False, **POD)
    (node.checkpoints / "i").chmod(0o755)
    (node.checkpoints / "i" / "pages-1.img").chmod(0o644)
    node.run("import", "i", "--yes")
    target = node.checkpoints / "shop" / "i"
    assert listed(node) == {str(target): True}
    assert node.json("images")[0]["states"] == []
    assert not verify(target)


def test_image_in_its_place_is_signed_again(node: Node, tmp_path: Path) -> None:
    save(node.checkpoints / "shop" / "i", key=Key(b"k" * 32, tmp_path / "k"), **POD)
    assert listed(node) == {str(node.checkpoints / "shop" / "i"): False}
    node.run("import", "shop/i", "--yes")
    assert listed(node) == {str(node.checkpoints / "shop" / "i"): True}


def test_image_in_its_place_that_others_can_change_is_copied_over_itself(node: Node) -> None:
    save(node.checkpoints / "shop" / "i", **POD)
    (node.checkpoints / "shop" / "i" / "pages-1.img").chmod(0o666)
    node.run("import", "shop/i", "--yes")
    assert node.json("images")[0]["states"] == []
    assert not verify(node.checkpoints / "shop" / "i")


def test_taken_name_is_refused(node: Node, foreign: Path) -> None:
    save(foreign, signed=False)
    save(node.checkpoints / "i")
    assert "i exists" in node.run("import", str(foreign), "--yes", status=1).stderr
    node.run("import", str(foreign), "other", "--yes")


def test_image_with_the_name_of_its_namespace_is_not_moved_into_itself(node: Node) -> None:
    save(node.checkpoints / "shop", signed=False, **POD)
    assert "inside the image itself" in node.run("import", "shop", "--yes", status=1).stderr
    assert not verify(node.checkpoints / "shop")


@pytest.mark.parametrize("argv", [("../x",), ("x/../y",), ("x", "-n", "../shop"), (".x",), ("x", "-n", "UPPER")])
def test_odd_names_are_refused(node: Node, foreign: Path, argv: tuple[str, ...]) -> None:
    save(foreign, signed=False)
    assert "is not the name of" in node.run("import", str(foreign), *argv, "--yes", status=1).stderr
    assert not node.checkpoints.exists()


def test_logs_are_left_behind(node: Node, foreign: Path) -> None:
    save(foreign, signed=False)
    (foreign / "dump.log").write_text("not covered by any digest")
    node.run("import", str(foreign), "--yes")
    assert not (node.checkpoints / "i" / "dump.log").exists()


def test_files_of_vram_are_compared_and_get_strong_digests(node: Node, foreign: Path) -> None:
    manifest = save(foreign, signed=False)
    content = (bytes(range(256)) * 40)[:10_000] + bytes(2 << 20)
    tree = vram_digest.Tree(len(content), 4096)
    for offset in range(0, len(content), 4096):
        tree.add(offset, memoryview(content)[offset : offset + 4096])
    (foreign / "kybernate-vram-1-0.bin").write_bytes(content)
    vram = VramFile(1, "kybernate-vram-1-0.bin", 0x10000, len(content), len(content), tree.text())
    files = (*manifest.files, File(vram.file, vram.size, vram.digest))
    (foreign / NAME).write_bytes(encode(replace(manifest, vram=(vram,), files=files)))
    node.run("import", str(foreign), "--yes")
    copy = node.checkpoints / "i"
    manifest = manifest_of(copy)
    assert manifest.vram[0].digest == manifest.files[-1].digest
    assert manifest.vram[0].digest.startswith("blake3-tree:4096:")
    assert not verify(copy)
    assert (copy / vram.file).stat().st_blocks * 512 < len(content)
    flip(foreign / vram.file)
    assert f"{vram.file}: digest" in node.run("import", str(foreign), "again", "--yes", status=1).stderr


def test_imported_image_is_restored(node: Node, foreign: Path) -> None:
    save(foreign, signed=False)
    node.containerd.add_image("busybox:1")
    node.containerd.on_task = lambda namespace, id: node.shim(id, namespace=namespace).add(id, state="created")
    node.run("restore", str(foreign), "-d", status=4)
    node.run("import", str(foreign), "--yes")
    node.run("restore", "i", "-d")
    spec = json.loads(node.containerd.containers["default", "counter"].spec.value)
    assert spec["process"] == SPEC["process"]


def audited(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]


def test_every_import_leaves_a_line_in_the_audit_log(node: Node, foreign: Path, tmp_path: Path) -> None:
    save(foreign, signed=False)
    node.run("import", str(foreign), "--yes", "-n", "shop")
    node.run("import", str(foreign), "--yes", "-n", "shop", status=1)
    done, failed = audited(tmp_path)
    assert (done["verb"], done["decision"], done["reason"]) == ("import", "done", f"from {foreign}")
    assert done["image"]["manifest_digest"] == read_image(node.checkpoints / "shop" / "i").digest
    assert done["image"]["source_namespace"] == "shop"
    assert (done["caller"]["by"], done["caller"]["uid"]) == ("kybernate", os.getuid())
    assert (failed["decision"], failed["reason"]) == ("failed", f"{node.checkpoints}/shop/i exists")


def test_restore_that_is_refused_leaves_a_line(node: Node, foreign: Path, tmp_path: Path) -> None:
    save(foreign, signed=False)
    node.run("restore", str(foreign), "-d", status=4)
    (line,) = audited(tmp_path)
    assert (line["verb"], line["decision"]) == ("restore", "refused")
    assert "is not signed" in line["reason"]


def test_json_needs_yes(node: Node, foreign: Path) -> None:
    save(foreign, signed=False)
    assert "--yes" in node.run("import", str(foreign), "--json", status=2).stderr
