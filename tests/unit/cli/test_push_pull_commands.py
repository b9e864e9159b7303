"""`kybernate export`, `push` and `pull`: what is trusted as it is, what is asked, and what stays after a failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kybernate.cli import pull as pulling
from kybernate.node.deleting import delete
from kybernate.node.failure import Refused
from kybernate_shim.checkpoint.image.signature import sign
from kybernate_shim.checkpoint.image.store import read_image, write_manifest
from kybernate_shim.trust.keys import Key
from tests.fakes.image_registry import Broken, FakeRegistry, registry
from tests.unit.cli.conftest import Node
from tests.unit.cli.saved_image import save

POD = {"namespace": "shop", "pod": "front", "name": "web"}


@pytest.fixture
def server() -> Iterator[FakeRegistry]:
    with registry() as it:
        yield it


@pytest.fixture
def reference(server: FakeRegistry) -> str:
    return f"{server.host}/checkpoints/web:v1"


def images(node: Node) -> set[str]:
    """Return all that lies in the directory of images, whatever it is."""
    return {str(path.relative_to(node.checkpoints)) for path in node.checkpoints.rglob("*") if path.is_dir()}


def test_signed_image_is_usable_without_a_question(node: Node, reference: str) -> None:
    save(node.checkpoints / "shop/i", **POD)
    pushed = node.json("push", "shop/i", reference)
    assert pushed["reference"] == f"{reference}@{pushed['digest']}"
    pulled = node.json("pull", reference, "again")
    assert (pulled["path"], pulled["digest"]) == (str(node.checkpoints / "shop/again"), pushed["digest"])
    assert read_image(node.checkpoints / "shop/again").content == read_image(node.checkpoints / "shop/i").content
    assert all(one["usable"] for one in node.json("images"))


def test_pull_takes_the_name_that_the_image_had_and_replaces_nothing(node: Node, reference: str) -> None:
    save(node.checkpoints / "shop/i", **POD)
    node.run("push", "shop/i", reference)
    assert "i exists" in node.run("pull", reference, status=1).stderr
    (node.checkpoints / "shop/i").rename(node.checkpoints / "shop/j")
    assert yaml.safe_load(node.run("pull", reference, "-o", "yaml").stdout)["path"] == str(node.checkpoints / "shop/i")
    assert images(node) == {"shop", "shop/i", "shop/j"}


@pytest.mark.parametrize("how", ["unsigned", "another node's", "weak digests"])
def test_other_images_are_shown_and_asked_for(node: Node, reference: str, how: str) -> None:
    key = Key(b"k" * 32, Path("other.key")) if how == "another node's" else None
    weak = "xxh128" if how == "weak digests" else "blake2b"
    save(node.checkpoints / "i", signed=how != "unsigned", key=key, digest=weak)
    assert ("every `kybernate pull` of it asks" in node.run("push", "i", reference).stderr) == (how == "weak digests")
    said = node.run("pull", reference, "new", status=4)
    assert "this needs a confirmation" in said.stderr
    assert f"image:           {reference}" in said.stdout
    assert "use --yes" in node.run("pull", reference, "new", "-o", "json", status=4).stderr
    assert images(node) == {"i"}
    assert node.json("pull", reference, "new", "--yes")["source"] == reference
    assert {one["name"]: one["usable"] for one in node.json("images")}["new"]


def test_namespace_that_a_foreign_image_claims_is_not_believed(node: Node, reference: str) -> None:
    save(node.checkpoints / "shop/i", signed=False, **POD)
    node.run("push", "shop/i", reference)
    assert "--namespace shop" in node.run("pull", reference, "new", "--yes", status=1).stderr
    assert images(node) == {"shop", "shop/i"}
    assert node.json("pull", reference, "new", "--yes", "-n", "other")["namespace"] == "other"


def test_image_that_is_not_what_was_signed_is_refused(node: Node, reference: str) -> None:
    """The signature is valid, and the files are another image's: the one who pushed it had no key."""
    save(node.checkpoints / "i")
    path = node.checkpoints / "i/core-1.img"
    path.write_bytes(path.read_bytes()[::-1])
    archive = node.checkpoints.parent / "forged.tar"
    node.run("export", "i", str(archive), "-f", "checkpointctl", status=1)
    good = node.checkpoints / "good"
    save(good)
    node.run("export", "good", str(archive), "-f", "checkpointctl")
    archive.write_bytes(archive.read_bytes().replace(b"registers", b"sretsiger"))
    said = node.run("pull", str(archive), "new", status=1).stderr
    assert "is not what its signed manifest lists: core-1.img: changed" in said
    assert images(node) == {"i", "good"}


def test_encrypted_image_that_no_key_here_has_signed_is_refused(node: Node, reference: str, tmp_path: Path) -> None:
    key = tmp_path / "image.key"
    key.write_text("5e" * 32)
    key.chmod(0o600)
    with (tmp_path / "shim.toml").open("a") as settings:
        settings.write(f'encryption_key = "{key}"\n')
    save(node.checkpoints / "i", digest="xxh128")  # what is authenticated needs no strong digest
    node.run("encrypt", "i")
    node.run("push", "i", reference)
    assert node.json("pull", reference, "again")["encrypted"]
    image = read_image(node.checkpoints / "i")
    write_manifest(image.path, sign(image.manifest, Key(b"k" * 32, Path("other.key"))))
    node.run("push", "i", reference)
    assert "is encrypted, and no key that is valid here" in node.run("pull", reference, "new", "--yes", status=1).stderr
    write_manifest(image.path, image.manifest)
    key.write_text("6f" * 32)
    node.run("push", "i", reference)
    assert "cannot be compared with its manifest" in node.run("pull", reference, "new", status=1).stderr
    assert images(node) == {"i", "again"}


@pytest.mark.parametrize("format", ["oci", "oci-dir", "checkpointctl"])
def test_exports_are_pulled_by_their_path(node: Node, tmp_path: Path, format: str) -> None:
    save(node.checkpoints / "i")
    done = node.json("export", "i", str(tmp_path / "e"), "--format", format)
    assert (done["format"], bool(done["digest"])) == (format, format != "checkpointctl")
    assert "nothing was written" in node.run("export", "i", str(tmp_path / "e"), "--format", format, status=1).stderr
    assert node.json("pull", str(tmp_path / "e"), "new")["path"] == str(node.checkpoints / "new")
    assert json.loads((tmp_path / "audit.jsonl").read_text().splitlines()[0])["verb"] == "export"


def test_what_is_no_export_is_refused(node: Node, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no archive " * 100)
    (tmp_path / "directory").mkdir()
    for name in ("text", "directory", "absent"):
        node.run("pull", str(tmp_path / name), "new", status=1)
    assert images(node) == set()
    save(node.checkpoints / "i")
    node.run("export", "i", str(tmp_path / "c.tar"), "-f", "checkpointctl")
    assert "give a name after the reference" in node.run("pull", str(tmp_path / "c.tar"), status=4).stderr


@pytest.fixture
def interruptible() -> Iterator[None]:
    """The signal interrupts, also where a shell has started the tests in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_leaves_nothing(node: Node, reference: str, server: FakeRegistry) -> None:
    save(node.checkpoints / "i")
    ended = threading.Event()

    def interrupt(number: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        ended.wait(60)  # the command ends by the signal, not by the connection that breaks then
        raise Broken

    server.faults["PUT manifests"] = interrupt
    said = node.run("push", "i", reference, status=130).stderr
    ended.set()
    assert "refers to what it did before" in said
    assert server.manifests == {}
    del server.faults["PUT manifests"]
    node.run("push", "i", reference)
    ended.clear()
    server.faults["GET blobs"] = interrupt
    assert "nothing was kept" in node.run("pull", reference, "new", status=130).stderr
    ended.set()
    assert images(node) == {"i"}


def test_image_is_not_removed_while_it_is_pushed(node: Node, reference: str, server: FakeRegistry) -> None:
    save(node.checkpoints / "i")
    refused: list[Exception] = []

    def remove(number: int) -> None:
        try:
            delete(node.checkpoints / "i", "x")
        except Refused as error:
            refused.append(error)

    server.faults["PUT manifests"] = remove
    node.run("push", "i", reference)
    assert len(refused) == 1


def test_references_and_paths_are_told_apart() -> None:
    assert [pulling.is_path(text) for text in ("/a", "./a", "../a", "a/b", "localhost:5/a")] == [True] * 3 + [False] * 2


def test_help_loads_no_library_of_registries() -> None:
    program = (
        "import sys; from kybernate.cli.application import application; application(['push']); application(['pull']);"
        "assert not {'httpx', 'zstandard'} & sys.modules.keys()"
    )
    subprocess.run(
        [sys.executable, "-c", program], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
