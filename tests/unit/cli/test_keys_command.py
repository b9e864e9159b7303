"""`kybernate keys`: what verifies on this node, and what becomes unusable with a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from kybernate.cli import asking
from tests.unit.cli.conftest import Node
from tests.unit.cli.saved_image import save


def states(node: Node) -> dict[str, list[str]]:
    return {one["name"]: one["states"] for one in node.json("images")}


def configured(tmp_path: Path, line: str) -> None:
    settings = tmp_path / "shim.toml"
    settings.write_text(f"{settings.read_text()}{line}\n")


def test_node_without_keys_has_an_empty_list(node: Node, tmp_path: Path) -> None:
    assert node.run("keys", "list").stdout.split() == ["ID", "KIND", "FILE", "CREATED", "IMAGES"]
    assert node.run("keys", "path").stdout == f"{tmp_path}/keys\n"


def test_keys_are_listed_with_the_images_that_they_signed(node: Node, tmp_path: Path) -> None:
    first = save(node.checkpoints / "a").signature.key
    rotated = node.json("keys", "rotate")
    assert rotated == {"old": first, "new": rotated["new"], "file": f"{tmp_path}/keys/node.key"}
    second = save(node.checkpoints / "b").signature.key
    assert second == rotated["new"] != first
    rows = [line.split() for line in node.run("keys", "list").stdout.splitlines()[1:]]
    assert [[*row[:3], row[-1]] for row in rows] == [
        [second, "node", f"{tmp_path}/keys/node.key", "1"],
        [first, "retired", f"{tmp_path}/keys/retired-{first}.key", "1"],
    ]
    assert states(node) == {"a": [], "b": []}


def test_shared_key_comes_first(node: Node, tmp_path: Path) -> None:
    save(node.checkpoints / "a")
    (tmp_path / "cluster.key").write_text("ab" * 32)
    (tmp_path / "cluster.key").chmod(0o600)
    configured(tmp_path, f'shared_key = "{tmp_path}/cluster.key"')
    shared = save(node.checkpoints / "b").signature.key
    assert [(one["id"] == shared, one["kind"], one["images"]) for one in node.json("keys", "list")] == [
        (True, "shared", 1),
        (False, "node", 1),
    ]
    result = node.run("keys", "revoke", shared, "--yes", status=4)
    assert "which other nodes also have" in result.stderr
    assert (tmp_path / "cluster.key").exists()
    assert "still signed by the shared key" in node.run("keys", "rotate").stdout


def test_key_that_cannot_be_used_is_shown_and_hides_none(node: Node, tmp_path: Path) -> None:
    id = save(node.checkpoints / "a").signature.key
    (tmp_path / "keys" / "open.key").write_text("ab" * 32)
    (tmp_path / "keys" / "open.key").chmod(0o644)
    result = node.run("keys", "list")
    assert result.stdout.splitlines()[1].split()[0] == id
    assert "retired, unusable" in result.stdout
    assert "open.key belongs to uid" in result.stderr
    assert states(node) == {"a": []}


def test_revoked_key_makes_its_images_unusable(node: Node) -> None:
    id = save(node.checkpoints / "a").signature.key
    node.json("keys", "rotate")
    save(node.checkpoints / "b")
    shown = node.run("keys", "revoke", id, "--yes").stdout
    assert "images that become unusable: 1" in shown
    assert f"{node.checkpoints}/a" in shown
    assert f"{node.checkpoints}/b" not in shown
    assert states(node) == {"a": ["foreign"], "b": []}
    node.run("import", "a", "--yes")
    assert states(node) == {"a": [], "b": []}


def test_revocation_is_asked_for(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    id = save(node.checkpoints / "a").signature.key
    assert "--yes" in node.run("keys", "revoke", id, status=4).stderr
    monkeypatch.setattr(asking, "is_terminal", lambda: True)
    assert "the key is still valid" in node.run("keys", "revoke", id, status=4, input="n\n").stderr
    assert states(node) == {"a": []}
    node.run("keys", "revoke", id, input="y\n")
    assert states(node) == {"a": ["foreign"]}


def test_unknown_key_is_not_revoked(node: Node) -> None:
    save(node.checkpoints / "a")
    assert "no key here has the identifier 'node'" in node.run("keys", "revoke", "node", "--yes", status=3).stderr
