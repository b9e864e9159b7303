"""`kybernate store`, over a directory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kybernate.agent.settings import Settings
from kybernate_shim.checkpoint.image.manifest import NAME
from tests.unit.cli.conftest import Node
from tests.unit.cli.saved_image import save

MIB = 1 << 20


@pytest.fixture
def place(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The store that the node's configuration names; it is made."""
    settings = tmp_path / "agent.toml"
    settings.write_text(f'[store]\nurl = "file://{tmp_path}/store"\nkey = "{tmp_path}/store-key/key"\n')
    load: Callable[[Path], Settings] = Settings.load
    monkeypatch.setattr(Settings, "load", lambda: load(settings))
    assert "encrypted: no" in " ".join(node.run("store", "init").stdout.split())
    return tmp_path / "store"


def image(node: Node, name: str) -> Path:
    save(node.checkpoints / name)
    return node.checkpoints / name


def test_image_is_stored_listed_brought_back_and_removed(node: Node, place: Path, tmp_path: Path) -> None:
    directory = image(node, "counter")
    said = node.json("store", "put", "counter")
    assert (said["name"], said["done_bytes"]) == ("counter", said["total_bytes"])
    assert node.json("store", "put", "counter")["sent_bytes"] == 0
    (listed,) = node.json("store", "ls")
    assert (listed["id"], listed["name"]) == (said["id"], "counter")
    assert "counter" in node.run("store", "ls").stdout
    node.run("store", "get", "counter", str(tmp_path / "back"))
    for path in directory.iterdir():
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()
    assert node.json("store", "stats")["images"] == 1
    assert json.loads(node.run("store", "stats", "-o", "json").stdout) == node.json("store", "stats")
    assert "images: 1\n" in node.run("store", "stats", "--output", "yaml").stdout
    assert node.run("store", "rm", "counter").stdout == "removed counter\n"
    assert node.json("store", "ls") == []


def test_image_is_not_brought_back_over_another(node: Node, place: Path) -> None:
    image(node, "counter")
    node.run("store", "put", "counter")
    assert "counter exists" in node.run("store", "get", "counter", str(node.checkpoints / "counter"), status=4).stderr


def test_damaged_image_is_named_and_brings_back_nothing(node: Node, place: Path, tmp_path: Path) -> None:
    image(node, "counter")
    node.run("store", "put", "counter")
    (pack,) = [path for path in (place / "packs").rglob("*") if path.is_file()]
    content = bytearray(pack.read_bytes())
    content[20] ^= 1
    pack.write_bytes(content)
    result = node.run("store", "check", "--read", status=1)
    assert "chunks are missing or damaged" in result.stdout
    assert "are damaged" in result.stderr
    assert result.stdout.splitlines()[-1] == "damaged: 1 of 1 images cannot be restored"
    assert node.json("store", "check", "--read", status=1)["verdict"].startswith("damaged")
    failed = node.run("store", "get", "counter", str(tmp_path / "back"), status=1).stderr
    assert "kybernate: chunk " in failed
    assert "another copy where there is one" in failed
    assert not list(tmp_path.glob("*back*"))


def test_changed_manifest_in_the_store_is_damage(node: Node, place: Path) -> None:
    manifest = image(node, "counter") / NAME
    node.run("store", "put", "counter")
    assert node.run("store", "check").stdout.splitlines()[-1] == "whole: 1 images"
    node.run("store", "rm", "counter")
    manifest.write_bytes(manifest.read_bytes().replace(b"busybox:1", b"busybox:2"))
    node.run("store", "put", "counter")
    result = node.run("store", "check", status=1)
    assert "the manifest was changed after it was signed" in result.stdout
    assert result.stdout.splitlines()[-1] == "damaged: 1 of 1 images cannot be restored"


def test_damaged_pack_without_an_image_is_damage_too(node: Node, place: Path) -> None:
    image(node, "counter")
    node.run("store", "put", "counter")
    node.run("store", "rm", "counter")
    (pack,) = [path for path in (place / "packs").rglob("*") if path.is_file()]
    pack.write_bytes(b"no pack")
    result = node.run("store", "check", status=1)
    assert result.stdout.splitlines()[-1] == "damaged: no image, but 1 packs or indexes"


def test_unknown_image_and_missing_store_are_named(node: Node, place: Path, tmp_path: Path) -> None:
    assert "no image named 'none'" in node.run("store", "get", "none", status=3).stderr
    assert (
        "there is no store at this place" in node.run("store", "ls", "--url", f"file://{tmp_path}/o", status=1).stderr
    )
    for url in ("ftp://x/y", "http://["):
        assert "is not the URL of a store" in node.run("store", "ls", "--url", url, status=1).stderr


def test_store_must_be_configured(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "load", Settings)
    assert "no store is configured" in node.run("store", "ls", status=1).stderr


def test_key_that_others_can_read_is_refused(node: Node, place: Path, tmp_path: Path) -> None:
    (tmp_path / "store-key/key").chmod(0o644)
    assert "is open to other users" in node.run("store", "ls", status=1).stderr


def test_collection_is_told(node: Node, place: Path) -> None:
    image(node, "counter")
    node.run("store", "put", "counter")
    node.run("store", "rm", "counter")
    os.utime(next(path for path in (place / "packs").rglob("*") if path.is_file()), (1, 1))
    assert node.json("store", "gc", "--dry-run")["condemned_packs"] == 1
    assert json.loads(node.run("store", "gc", "--json").stdout)["condemned_packs"] == 1
    assert json.loads(node.run("store", "gc", "-o", "json", "--grace", "1").stdout)["deleted_packs"] == 0
    assert "deleted:" in node.run("store", "gc", "--grace", "0").stdout
