"""`kybernate images`: what lies below the roots, and what it is good for, whatever else lies there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kybernate.node import images
from kybernate_shim.checkpoint.image.manifest import NAME
from kybernate_shim.trust.keys import Key
from tests.unit.cli.conftest import Node
from tests.unit.cli.saved_image import save

POD = {"pod": "front", "name": "web"}
OLD = "2020-01-01T00:00:00.000Z"


def states(node: Node, *argv: str) -> dict[str, list[str]]:
    """Return the states of all images by their paths below the checkpoint root."""
    listed = node.json("images", "--all", *argv)
    return {os.path.relpath(one["path"], node.checkpoints): one["states"] for one in listed}


def usable(node: Node) -> set[str]:
    return {one["name"] for one in node.json("images") if one["usable"]}


def test_node_without_images_has_an_empty_list(node: Node) -> None:
    assert node.run("images").stdout.split() == [word for cell in images_header() for word in cell.split()]
    assert node.json("images") == []


def images_header() -> tuple[str, ...]:
    return ("NAME", "NAMESPACE", "SOURCE", "SIZE", "AGE", "TIERS", "STATE")


def test_images_are_shown_by_namespace_and_name(node: Node) -> None:
    save(node.checkpoints / "shop" / "b", namespace="shop", time=OLD, **POD)
    save(node.checkpoints / "shop" / "a", namespace="shop", time=OLD, **POD)
    save(node.checkpoints / "mine", time=OLD)
    rows = [line.split() for line in node.run("images").stdout.splitlines()[1:]]
    assert [row[:3] for row in rows] == [
        ["mine", "-", "counter"],
        ["a", "shop", "front/web"],
        ["b", "shop", "front/web"],
    ]
    for row in rows:
        assert row[3:5] == ["16.1", "KiB"]
        assert row[5].endswith("d")
        assert row[6:] == ["disk", "usable"]


def test_image_as_json(node: Node) -> None:
    manifest = save(node.checkpoints / "shop" / "a", namespace="shop", **POD)
    (listed,) = node.json("images")
    expected = {
        "name": "a",
        "namespace": "shop",
        "path": str(node.checkpoints / "shop" / "a"),
        "bytes": manifest.bytes,
        "created": manifest.time,
        "usable": True,
        "states": [],
        "reason": "",
    }
    assert {key: listed[key] for key in expected} == expected
    assert (listed["source"]["pod"], listed["source"]["container"]) == ("front", "web")


def test_what_keeps_pods_from_an_image_is_its_state(node: Node, tmp_path: Path) -> None:
    save(node.checkpoints / "old", namespace="shop", signed=False, **POD)
    save(node.checkpoints / "moved", namespace="shop", **POD)
    save(node.checkpoints / "other" / "strange", namespace="shop", **POD)
    save(node.checkpoints / "shop" / "unsigned", namespace="shop", signed=False, **POD)
    save(node.checkpoints / "shop" / "foreign", namespace="shop", key=Key(b"k" * 32, tmp_path / "k"), **POD)
    save(node.checkpoints / "shop" / "changed", namespace="shop", **POD)
    manifest = node.checkpoints / "shop" / "changed" / NAME
    manifest.write_text(manifest.read_text().replace("busybox:1", "busybox:2"))
    assert states(node) == {
        "old": ["unsigned", "wrong namespace"],
        "moved": ["wrong namespace"],
        "other/strange": ["wrong namespace"],
        "shop/unsigned": ["unsigned"],
        "shop/foreign": ["foreign"],
        "shop/changed": ["foreign"],
    }
    assert usable(node) == set()


def test_image_that_others_can_read_is_usable_and_one_that_they_can_change_is_not(node: Node) -> None:
    for name, mode in (("read", 0o644), ("written", 0o666)):
        save(node.checkpoints / name)
        (node.checkpoints / name / "core-1.img").chmod(mode)
        (node.checkpoints / name).chmod(0o755)
    assert states(node) == {"read": ["open to others"], "written": ["open to others"]}
    assert usable(node) == {"read"}
    assert "core-1.img belongs to uid" in node.json("images", "read")[0]["reason"]


def test_broken_images_never_hide_the_others(node: Node) -> None:
    save(node.checkpoints / "good")
    for name in ("fifo", "link", "huge", "torn", "deep", "missing", "binary"):
        save(node.checkpoints / name)
        (node.checkpoints / name / NAME).unlink()
    os.mkfifo(node.checkpoints / "fifo" / NAME)
    (node.checkpoints / "link" / NAME).symlink_to(node.checkpoints / "good" / NAME)
    with (node.checkpoints / "huge" / NAME).open("wb") as file:
        file.truncate(1 << 40)
    (node.checkpoints / "torn" / NAME).write_text("{")
    (node.checkpoints / "deep" / NAME).write_text("[" * 100_000)
    (node.checkpoints / "binary" / NAME).write_bytes(b"\xff\0" * 100)
    save(node.checkpoints / "gone")
    (node.checkpoints / "gone" / "core-1.img").unlink()
    (node.checkpoints / "elsewhere").symlink_to("/")
    (node.checkpoints / "file").write_text("not an image")
    os.mkfifo(node.checkpoints / "pipe")
    damaged = {name: ["damaged"] for name in ("fifo", "link", "huge", "torn", "deep", "binary", "gone")}
    assert states(node) == {"good": [], "missing": ["unfinished"], **damaged}
    assert usable(node) == {"good"}


def test_links_lead_nowhere(node: Node, tmp_path: Path) -> None:
    save(tmp_path / "outside" / "a")
    node.checkpoints.mkdir()
    (node.checkpoints / "shop").symlink_to(tmp_path / "outside")
    (node.checkpoints / "a").symlink_to(tmp_path / "outside" / "a")
    assert node.json("images", "--all") == []


def test_number_of_entries_is_limited(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MOST_ENTRIES", 3)
    for name in "abcdef":
        save(node.checkpoints / name)
    result = node.run("images", "-q")
    assert len(result.stdout.splitlines()) == 3
    assert "the list is not complete" in result.stderr


def test_unfinished_images_are_shown_on_request_only(node: Node) -> None:
    save(node.checkpoints / "shop" / "a", namespace="shop", **POD)
    (node.checkpoints / "shop" / "a" / NAME).unlink()
    (node.checkpoints / "shop" / ".import-0123").mkdir()
    assert node.json("images") == []
    assert states(node) == {"shop/a": ["unfinished"], "shop/.import-0123": ["unfinished"]}


def test_names_and_namespaces_choose(node: Node) -> None:
    save(node.checkpoints / "shop" / "web-1", namespace="shop", **POD)
    save(node.checkpoints / "bank" / "web-1", namespace="bank", **POD)
    save(node.checkpoints / "bank" / "db", namespace="bank", **POD)
    root = node.checkpoints
    assert node.run("images", "-q", "-n", "bank").stdout.split() == [f"{root}/bank/db", f"{root}/bank/web-1"]
    assert node.run("images", "-q", "web-*").stdout.split() == [f"{root}/bank/web-1", f"{root}/shop/web-1"]
    assert node.run("images", "-q", "shop/web-1").stdout.split() == [f"{root}/shop/web-1"]
    assert "no checkpoint image has the name web-2" in node.run("images", "web-1", "web-2", status=3).stderr


def test_trusted_roots_are_listed_by_path(node: Node, tmp_path: Path) -> None:
    settings = tmp_path / "shim.toml"
    settings.write_text(f'{settings.read_text()}trusted_roots = ["{tmp_path}/shared", "{tmp_path}/absent"]\n')
    (tmp_path / "shared").mkdir(mode=0o700)
    save(tmp_path / "shared" / "models" / "a", namespace="shop", **POD)
    (listed,) = node.json("images")
    assert (listed["name"], listed["namespace"], listed["usable"]) == (f"{tmp_path}/shared/models/a", "shop", True)
    assert listed["states"] == []
