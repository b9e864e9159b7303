"""`kybernate encrypt`, `decrypt`, and what `inspect` shows of an encrypted image."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kybernate.node import verdict
from kybernate_shim.checkpoint.image.manifest import NAME
from kybernate_shim.checkpoint.image.store import read_image
from tests.unit.cli.conftest import Node
from tests.unit.cli.saved_image import SPEC, save


@pytest.fixture
def keys(node: Node, tmp_path: Path) -> Path:
    """The node's key file, which its configuration names, and an image `i`."""
    file = tmp_path / "image.key"
    write(file, "11" * 32)
    with (tmp_path / "shim.toml").open("a") as settings:
        settings.write(f'encryption_key = "{file}"\n')
    save(node.checkpoints / "i")
    return file


def write(file: Path, *keys: str) -> None:
    file.write_text("\n".join(keys))
    file.chmod(0o600)


def key_id(node: Node) -> str:
    encryption = read_image(node.checkpoints / "i").manifest.encryption
    assert encryption is not None
    return encryption.key_id


def test_image_is_encrypted_shown_verified_and_decrypted(
    node: Node, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict, "unrestorable", lambda place, manifest: [])  # CRIU has not written it
    before = {path.name for path in (node.checkpoints / "i").iterdir()}
    assert node.json("encrypt", "i")["outcome"] == "encrypted"
    assert {path.name for path in (node.checkpoints / "i").iterdir()} == {
        name if name == NAME else f"{name}.enc" for name in before
    }
    shown = node.run("inspect", "i").stdout
    assert f"encrypted:     key {key_id(node)}, AES-256-GCM" in shown.splitlines()
    assert f"key {key_id(node)} (`encryption_key`), and 16.1 KiB of memory more, for the decrypted files" in shown
    assert node.run("inspect", "i", "--verify").stdout.endswith(
        "verified: 3 files are unchanged, and the signature is valid here\n"
    )
    assert node.json("decrypt", "i")["outcome"] == "decrypted"
    assert {path.name for path in (node.checkpoints / "i").iterdir()} == before
    assert node.run("inspect", "i", "--verify").stdout.endswith(
        "verified: 3 files are unchanged, and the signature is valid here\n"
    )


def test_inspect_needs_no_key_and_verify_says_which(node: Node, keys: Path) -> None:
    node.run("encrypt", "i")
    id = key_id(node)
    write(keys, "22" * 32)
    assert id in node.run("inspect", "i").stdout
    said = node.run("inspect", "i", "--verify", status=1).stderr
    assert f"encrypted with key {id}, which is not in {keys}" in said
    assert node.run("decrypt", "i", "--key", str(keys), status=1).stderr.count(id) == 1


def test_first_key_takes_over(node: Node, keys: Path) -> None:
    node.run("encrypt", "i")
    old = key_id(node)
    write(keys, "22" * 32, "11" * 32)
    assert node.json("encrypt", "i")["outcome"] == "wrapped again"
    assert key_id(node) != old
    assert node.json("encrypt", "i")["outcome"] == "nothing to do"


def test_node_without_a_key_says_what_to_do(node: Node) -> None:
    save(node.checkpoints / "i")
    said = node.run("encrypt", "i", status=4).stderr
    assert "encryption_key" in said
    assert "openssl rand -hex 32" in said


def test_missing_and_damaged_images_are_named(node: Node, keys: Path) -> None:
    assert "no checkpoint image" in node.run("encrypt", "none", status=1).stderr
    node.run("encrypt", "i")
    path = node.checkpoints / "i" / "core-1.img.enc"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    said = node.run("decrypt", "i", status=1).stderr
    assert "core-1.img" in said
    assert "the image is as it was" in said
    problems = node.json("inspect", "i", "--verify", status=1)["problems"]
    assert [problem["file"] for problem in problems] == ["core-1.img.enc"]


def test_spec_of_an_encrypted_image_is_read_for_a_restore(node: Node, keys: Path) -> None:
    from kybernate.node.restore import saved_spec

    node.run("encrypt", "i")
    assert json.dumps(saved_spec(read_image(node.checkpoints / "i"), keys)) == json.dumps(SPEC)
