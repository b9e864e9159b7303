"""`kybernate inspect` on images that are whole, and on damaged ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kybernate_shim.checkpoint.manifest import NAME
from kybernate_shim.checkpoint.record import to_json
from tests.unit.cli.conftest import Node
from tests.unit.cli.saved_image import save


def test_image_is_shown(node: Node) -> None:
    save(node.checkpoints / "i")
    shown = node.run("inspect", "i").stdout
    for line in (
        "container:     counter",
        "made:          2026-11-21T05:00:00.000Z on here",
        "memory:        3.00 MiB",
        "VRAM:          1.00 GiB",
        "VRAM bytes:    in CRIU's files (process 7 is traced)",
        "  7     helper   2.00 MiB",
        "  7     unknown",
        "  GPU-1   NVIDIA H200   1.00 GiB",
        "  GPU-1   used",
        "  2 GPUs, whether it used them all or not: the driver wants a place for each",
        "  /data         ext4   host     /srv/data",
        "  dump   1.50 s   4.00 KiB",
        "  pages-1.img           16.0 KiB",
        "  container image busybox:1",
        "  a NVIDIA H200 with 1.00 GiB of free VRAM, driver 580.1",
        "  mounts at /data",
    ):
        assert line in shown.splitlines(), f"{line!r} is not in\n{shown}"


def test_image_as_json(node: Node) -> None:
    manifest = save(node.checkpoints / "i")
    assert node.json("inspect", "i") == {
        "path": str(node.checkpoints / "i"),
        "bytes": manifest.bytes,
        "memory_bytes": 3 << 20,
        "vram_bytes": 1 << 30,
        "verified": None,
        "problems": [],
        "manifest": to_json(manifest),
    }


def test_whole_image_is_verified(node: Node) -> None:
    save(node.checkpoints / "i")
    assert node.run("inspect", "i", "--verify").stdout.endswith("verified: 3 files are what they were\n")
    assert node.json("inspect", "i", "--verify")["verified"] is True


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (flip, "changed"),
        (Path.unlink, "missing"),
        (lambda path: path.write_bytes(b"x"), "truncated"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "longer"),
    ],
)
def test_damage_is_found(node: Node, damage: Callable[[Path], object], kind: str) -> None:
    save(node.checkpoints / "i")
    damage(node.checkpoints / "i" / "pages-1.img")
    result = node.run("inspect", "i", "--verify", status=1)
    assert "cannot be restored" in result.stderr
    assert result.stdout.splitlines()[1].split()[:2] == ["pages-1.img", kind]
    problems = node.json("inspect", "i", "--verify", status=1)["problems"]
    assert [(problem["file"], problem["kind"]) for problem in problems] == [("pages-1.img", kind)]


def test_missing_file_is_told_without_verify(node: Node) -> None:
    save(node.checkpoints / "i")
    (node.checkpoints / "i" / "core-1.img").unlink()
    assert "core-1.img: missing" in node.run("inspect", "i", status=1).stderr


@pytest.mark.parametrize("flags", [(), ("--verify",)])
def test_broken_manifest_is_told(node: Node, flags: tuple[str, ...]) -> None:
    save(node.checkpoints / "i")
    (node.checkpoints / "i" / NAME).write_text('{"version": 99}')
    assert "damaged checkpoint image" in node.run("inspect", "i", *flags, status=1).stderr


@pytest.mark.parametrize("flags", [(), ("--verify",)])
def test_missing_image_is_told(node: Node, flags: tuple[str, ...]) -> None:
    result = node.run("inspect", "nothing", *flags, status=1)
    assert f"{node.checkpoints}/nothing: no such directory" in result.stderr


def test_directory_beside_us_is_hinted_at(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert "did you mean ./mine?" in node.run("inspect", "mine", status=1).stderr
    node.run("inspect", "./mine")
