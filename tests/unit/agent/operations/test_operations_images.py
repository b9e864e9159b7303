"""Restores, and operations on images as real files."""

from __future__ import annotations

import asyncio
import os
import tarfile
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from kybernate.export.archives import export, unpack
from kybernate.node import verdict
from kybernate.node.deleting import trash_of
from kybernate.node.failure import Failure
from kybernate.node.restore import NotRestored
from kybernate.store.errors import ImageDamaged
from kybernate.verbs.delete import Delete
from kybernate.verbs.errors import OperationUndone
from kybernate.verbs.export import Export
from kybernate.verbs.importing import Import
from kybernate.verbs.model import Observation, Seen
from kybernate.verbs.restore import Restore
from kybernate.verbs.verify import Verify
from kybernate_shim.checkpoint.image.manifest import NAME
from kybernate_shim.checkpoint.image.requested import OPERATION
from kybernate_shim.checkpoint.image.store import read_image
from tests.unit.agent.operations.hands import ID, IGNORED, Hands
from tests.unit.cli.conftest import Node as FakeNode
from tests.unit.cli.conftest import node as node
from tests.unit.cli.saved_image import save


@pytest.fixture
def image(node: FakeNode) -> Path:
    """An image that can be restored; its task gets a shim."""
    node.containerd.add_image("busybox:1")

    def begin(namespace: str, id: str) -> None:
        node.shim(id, namespace=namespace).add(id, state="created")

    node.containerd.on_task = begin
    save(node.checkpoints / "first")
    return node.checkpoints / "first"


def test_restore_makes_a_container_that_carries_the_operation(node: FakeNode, hands: Hands, image: Path) -> None:
    operation = hands.operation(Restore("first"))
    assert operation.target.container == f"counter-{ID}"
    result = hands.run(operation)
    assert (result.path, result.pid) == (str(image), 4242)
    record = node.containerd.containers["default", f"counter-{ID}"]
    assert record.labels[OPERATION] == ID
    assert node.containerd.snapshot_labels[f"counter-{ID}"] == {OPERATION: ID}
    assert hands.observe(operation) == Observation(Seen.SUCCEEDED, "its container runs", result=result)


def test_failed_restore_leaves_nothing(node: FakeNode, hands: Hands, image: Path) -> None:
    node.containerd.failures["tasks.start"] = (grpc.StatusCode.UNKNOWN, "restore failed")
    operation = hands.operation(Restore("first", name="new"))
    with pytest.raises(NotRestored):
        hands.run(operation)
    assert hands.observe(operation).seen == Seen.ABSENT
    assert "new" not in node.containerd.snapshots


def test_half_made_container_is_rolled_back_and_no_other_is(node: FakeNode, hands: Hands, image: Path) -> None:
    operation = hands.operation(Restore("first", name="new"))
    hands.run(operation)
    node.containerd.tasks.pop(("default", "new"))
    assert hands.observe(operation).seen == Seen.HALF_DONE
    hands.roll_back(operation)
    assert ("default", "new") not in node.containerd.containers
    assert "new" not in node.containerd.snapshots
    node.containerd.snapshots["new"], node.containerd.snapshot_labels["new"] = "", {OPERATION: ID}
    assert hands.observe(operation).seen == Seen.HALF_DONE
    hands.roll_back(operation)
    assert hands.observe(operation).seen == Seen.ABSENT
    node.containerd.add("new")
    node.containerd.snapshots["new"], node.containerd.snapshot_labels["new"] = "", {}
    assert hands.observe(operation).seen == Seen.ABSENT
    hands.roll_back(operation)
    assert ("default", "new") in node.containerd.containers
    assert "new" in node.containerd.snapshots


def test_export_and_import_give_the_same_image(node: FakeNode, hands: Hands, tmp_path: Path) -> None:
    save(node.checkpoints / "first")
    archive = tmp_path / "first.tar"
    exported = hands.operation(Export("first", str(archive)))
    result = hands.run(exported)
    assert (result.path, result.bytes) == (str(archive), archive.stat().st_size)
    assert hands.observe(exported).seen == Seen.SUCCEEDED
    imported = hands.operation(Import(str(archive), name="second"))
    done = hands.run(imported)
    assert done.path == str(node.checkpoints / "second")
    first, second = (read_image(node.checkpoints / name).manifest for name in ("first", "second"))
    assert [file.name for file in first.files] == [file.name for file in second.files]
    assert sorted(path.name for path in node.checkpoints.iterdir()) == ["first", "second"]
    assert hands.observe(imported).seen == Seen.SUCCEEDED
    assert list(tmp_path.glob(".first*")) == []


def test_what_a_crash_leaves_of_files_is_rolled_back(node: FakeNode, hands: Hands, tmp_path: Path) -> None:
    save(node.checkpoints / "first")
    export = hands.operation(Export("first", str(tmp_path / "x.tar")))
    (tmp_path / f".x.tar.{ID}").write_text("half")
    load = hands.operation(Import(str(node.checkpoints / "first"), name="second"))
    for name in (f".import-{ID}", f".import-{ID}-archive"):
        (node.checkpoints / name).mkdir()
        (node.checkpoints / name / "half").write_text("half")
    for operation in (export, load):
        assert hands.observe(operation).seen == Seen.HALF_DONE
        hands.roll_back(operation)
        assert hands.observe(operation).seen == Seen.ABSENT
    assert [path.name for path in node.checkpoints.iterdir()] == ["first"]
    assert hands.run(export).bytes > 0


def test_export_does_not_replace_what_came_meanwhile(node: FakeNode, hands: Hands, tmp_path: Path) -> None:
    save(node.checkpoints / "first")
    operation = hands.operation(Export("first", str(tmp_path / "x.tar")))
    (tmp_path / "x.tar").write_text("another's")
    with pytest.raises(Failure, match="cannot be exported"):
        hands.run(operation)
    assert (tmp_path / "x.tar").read_text() == "another's"
    assert list(tmp_path.glob(".x.tar*")) == []


def test_deleted_image_is_gone_and_a_crash_in_between_is_completed(node: FakeNode, hands: Hands) -> None:
    first = node.checkpoints / "first"
    save(first)
    operation = hands.operation(Delete("first"))
    first.rename(trash_of(first, ID))
    (trash_of(first, ID) / NAME).unlink()
    assert hands.observe(operation).seen == Seen.ABSENT
    assert hands.run(operation).path == str(first)
    assert hands.observe(operation).seen == Seen.SUCCEEDED
    assert list(node.checkpoints.iterdir()) == []


def test_verify_names_what_is_damaged(node: FakeNode, hands: Hands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "unrestorable", lambda place, manifest: [])  # CRIU has not written it
    save(node.checkpoints / "first")
    assert hands.execute(Verify("first")).image_id == "3f6b"
    manifest = node.checkpoints / "first" / NAME
    content = manifest.read_bytes()
    manifest.write_bytes(content.replace(b"busybox:1", b"busybox:2"))
    with pytest.raises(ImageDamaged, match="the manifest was changed after it was signed"):
        hands.execute(Verify("first"))
    manifest.write_bytes(content)
    (node.checkpoints / "first" / "core-1.img").write_text("registerz")
    with pytest.raises(ImageDamaged, match=r"core-1\.img"):
        hands.execute(Verify("first"))


def test_namespace_that_an_unsigned_image_claims_is_not_believed(node: FakeNode, hands: Hands, tmp_path: Path) -> None:
    save(tmp_path / "foreign", signed=False, namespace="shop", pod="web")
    with pytest.raises(Failure, match="no key that is valid here"):
        hands.resolve(Import(str(tmp_path / "foreign")))
    target = hands.resolve(Import(str(tmp_path / "foreign"), namespace="shop"))
    assert target.image == str(node.checkpoints / "shop" / "foreign")


def test_cancelled_copy_is_undone(
    node: FakeNode, hands: Hands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(node.checkpoints / "first")
    begun, cancelled = threading.Event(), threading.Event()

    def slowly(*arguments: Any) -> int:
        begun.set()
        assert cancelled.wait(30)
        return export(*arguments)

    monkeypatch.setattr("kybernate.verbs.export.export", slowly)

    async def work() -> None:
        operation = await asyncio.to_thread(hands.operation, Export("first", str(tmp_path / "x.tar")))
        running = asyncio.create_task(hands.executor.execute(operation, IGNORED))
        assert await asyncio.to_thread(begun.wait, 30)
        await hands.executor.cancel(operation)
        cancelled.set()
        with pytest.raises(OperationUndone):
            await running

    asyncio.run(work())
    assert list(tmp_path.glob("*.tar")) == []


@pytest.mark.parametrize("kind", ["link", "up", "directory", "twice", "cut"])
def test_odd_archive_is_not_unpacked(tmp_path: Path, kind: str) -> None:
    archive, directory = tmp_path / "x.tar", tmp_path / "out"
    (tmp_path / "file").write_bytes(os.urandom(20_000))
    with tarfile.open(archive, "w") as tar:
        names = {"up": ["../up"], "directory": ["a/b"], "twice": ["a", "a"]}.get(kind, ["a"])
        for name in names:
            tar.add(tmp_path / "file", name)
        if kind == "link":
            link = tarfile.TarInfo("b")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(link)
    if kind == "cut":
        os.truncate(archive, 5000)
    with pytest.raises(Failure, match=r"has no|cannot be read|cannot be unpacked|at most"):
        unpack(archive, directory)
    assert not (tmp_path / "up").exists()
