"""`kybernate restore`: what containerd is asked for, in which order, and what is left when a step fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kybernate.node import shim as shims
from kybernate.node import stdio
from kybernate.node.lookup import KnownContainer
from kybernate.verbs import here
from kybernate.verbs import restore as restore_verb
from kybernate.verbs.attempt import Attempt
from kybernate_shim.checkpoint.image.manifest import NAME
from kybernate_shim.messages import shim_pb2
from kybernate_shim.messages.any import OCI_SPEC
from kybernate_shim.oci.spec import Spec
from kybernate_shim.trust.keys import Key
from kybernate_shim.trust.requester import Requester, requester_of
from tests.unit.cli.conftest import Node
from tests.unit.cli.fake_containerd import PID
from tests.unit.cli.fake_shim import FakeShim
from tests.unit.cli.saved_image import SPEC, save


def restorable(node: Node, *, layers: int = 2, **source: str) -> None:
    """Save an image, have its container image on the node, and let a shim come up with every new task."""
    save(node.checkpoints / "i", **source)
    node.containerd.add_image("busybox:1", layers=layers)

    def come_up(namespace: str, id: str) -> FakeShim:
        shim = node.shim(id, namespace=namespace)
        shim.add(id, state="created", phase="restore")
        return shim

    node.containerd.on_task = come_up


def test_container_is_made_and_started(node: Node) -> None:
    restorable(node)
    assert node.run("restore", "i", "-d").stdout.splitlines() == ["container: counter", f"pid:       {PID}"]
    record = node.containerd.containers["default", "counter"]
    assert (record.runtime.name, record.image) == ("io.containerd.kybernate.v1", "busybox:1")
    assert (record.snapshotter, record.snapshot_key) == ("overlayfs", "counter")
    assert record.spec.type_url == OCI_SPEC
    spec = json.loads(record.spec.value)
    assert spec["annotations"]["kybernate.io/restore-from"] == str(node.checkpoints / "i")
    assert spec["linux"]["cgroupsPath"] == "/default/counter"
    assert node.containerd.created[0].rootfs[0].source == "counter"


def test_answer_says_where_the_image_came_from_and_what_each_step_took(node: Node) -> None:
    restorable(node)
    come_up = node.containerd.on_task
    steps = [shim_pb2.Step(name="restore", seconds=0.4), shim_pb2.Step(name="vram-load", seconds=1.5, bytes=3 << 30)]
    last = shim_pb2.Ended(verb="restore", source="disk", seconds=2.25, steps=steps)

    def ended(namespace: str, id: str) -> FakeShim:
        shim = come_up(namespace, id)
        shim.containers[id].last.CopyFrom(last)
        return shim

    node.containerd.on_task = ended
    words = node.run("restore", "i", "-d").stdout.split()
    assert words[-13:] == [
        "disk", "time:", "2.25", "s", "STEP", "TIME", "SIZE", "restore", "400", "ms", "vram-load", "1.50", "s", "3.00",
        "GiB",
    ][-13:]  # fmt: skip
    document = node.json("restore", "i", "-d", "--name", "again")
    assert (document["source"], document["seconds"]) == ("disk", 2.25)
    assert [step["name"] for step in document["steps"]] == ["restore", "vram-load"]


def test_layers_are_unpacked_once(node: Node) -> None:
    restorable(node, layers=3)
    node.run("restore", "i", "-d", "--name", "one")
    assert node.containerd.calls.count("diff.apply") == 3
    node.run("restore", "i", "-d", "--name", "two")
    assert node.containerd.calls.count("diff.apply") == 3
    assert not any(key.startswith("extract-") for key in node.containerd.snapshots)
    assert node.containerd.leases == set()


def test_answer_as_json(node: Node) -> None:
    restorable(node)
    assert node.json("restore", "i", "--detach", "--name", "again", "-n", "default") == {
        "namespace": "default",
        "container": "again",
        "pid": PID,
        "path": str(node.checkpoints / "i"),
        "source": "",
        "seconds": 0.0,
        "steps": [],
    }


def test_options_choose_what_is_made(node: Node) -> None:
    restorable(node)
    node.containerd.add_image("other:2", namespace="moby")
    argv = ["--name", "x", "--image", "other:2", "--runtime", "io.containerd.runc.kybernate.v1", "-n", "moby"]
    node.run("restore", "i", "-d", *argv, "--snapshotter", "native", "--log", "/tmp/x.log", "--force")
    record = node.containerd.containers["moby", "x"]
    assert (record.image, record.runtime.name) == ("other:2", "io.containerd.runc.kybernate.v1")
    assert record.snapshotter == "native"
    assert json.loads(record.spec.value)["annotations"]["kybernate.io/force"] == "true"
    request = node.containerd.created[0]
    assert (request.stdout, request.stderr, request.stdin) == ("file:///tmp/x.log", "file:///tmp/x.log", "")


def test_foreground_shows_output_and_passes_the_status_on(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    restorable(node)
    come_up = node.containerd.on_task
    monkeypatch.setattr(stdio, "FIFOS", tmp_path / "fifo")

    def come_up_and_write(namespace: str, id: str) -> None:
        come_up(namespace, id)
        Path(node.containerd.created[-1].stdout).write_bytes(b"4711\n")

    node.containerd.on_task = come_up_and_write
    node.containerd.exit_status = 3
    node.run("restore", "i", status=3)
    assert capfdbinary.readouterr().out == b"4711\n"
    assert list((tmp_path / "fifo").iterdir()) == []
    assert ("default", "counter") not in node.containerd.containers
    assert ("default", "counter") not in node.containerd.tasks
    assert "counter" not in node.containerd.snapshots


def test_interrupt_is_the_containers(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restorable(node)
    monkeypatch.setattr(stdio, "FIFOS", tmp_path / "fifo")
    node.containerd.ended.clear()
    node.containerd.exit_status = 130

    def interrupt() -> None:
        if node.containerd.waits.wait(20):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    node.run("restore", "i", status=130)
    thread.join()
    assert node.containerd.signals == [signal.SIGINT]
    assert node.containerd.containers == {}


def test_interrupted_restore_leaves_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes may come back before the interrupt is noticed: nothing of them stays."""
    restorable(node)
    attempts, note = list[Attempt](), node.containerd.note

    class Watched(Attempt):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            attempts.append(self)

    def noted(call: str, context: grpc.ServicerContext) -> str:
        if call == "tasks.start":
            os.kill(os.getpid(), signal.SIGINT)
            assert attempts[0].stop.wait(20)
        return note(call, context)

    monkeypatch.setattr(here, "Attempt", Watched)
    monkeypatch.setattr(node.containerd, "note", noted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have the tests ignore it
    try:
        assert "container counter was removed again" in node.run("restore", "i", "-d", status=130).stderr
    finally:
        signal.signal(signal.SIGINT, before)
    assert "tasks.start" in node.containerd.calls
    assert (node.containerd.containers, node.containerd.tasks) == ({}, {})
    assert "counter" not in node.containerd.snapshots


FAILURES = ["snapshots.prepare", "diff.apply", "snapshots.commit", "containers.create", "tasks.create", "tasks.start"]


@pytest.mark.parametrize("call", FAILURES)
def test_failed_restore_leaves_nothing(node: Node, call: str) -> None:
    restorable(node)
    node.containerd.failures[call] = (grpc.StatusCode.UNKNOWN, "criu failed: pages-1.img is truncated")
    result = node.run("restore", "i", "-d", status=1)
    assert "criu failed: pages-1.img is truncated" in result.stderr
    assert node.containerd.containers == {}
    assert node.containerd.tasks == {}
    assert "counter" not in node.containerd.snapshots
    assert not any(key.startswith("extract-") for key in node.containerd.snapshots)
    assert node.containerd.leases == set()


def test_failed_restore_says_that_it_was_undone(node: Node) -> None:
    restorable(node)
    node.containerd.failures["tasks.start"] = (grpc.StatusCode.UNKNOWN, "no such mount: /data")
    assert node.run("restore", "i", "-d", status=1).stderr.splitlines()[:2] == [
        f"kybernate: cannot restore counter from {node.checkpoints}/i: no such mount: /data",
        "  state:  container counter was removed again; the checkpoint image is as it was",
    ]


def test_restore_that_cannot_be_undone_tells_both_failures(node: Node) -> None:
    restorable(node)
    node.containerd.failures["tasks.start"] = (grpc.StatusCode.UNKNOWN, "no such mount: /data")
    node.containerd.failures["containers.delete"] = (grpc.StatusCode.UNAVAILABLE, "the store is read-only")
    first, state = node.run("restore", "i", "-d", status=1).stderr.splitlines()[:2]
    assert first.startswith(
        f"kybernate: cannot restore counter from {node.checkpoints}/i: no such mount: /data; not undone: "
    )
    assert first.endswith("the store is read-only")
    assert state.startswith("  state:  not all of container counter was removed again")


def test_other_shim_is_never_started(node: Node) -> None:
    restorable(node)
    node.containerd.on_task = lambda namespace, id: node.shim(id, service="containerd.task.v3.Task")
    result = node.run("restore", "i", "-d", "--runtime", "io.containerd.runc.v2", status=4)
    assert "its runtime is io.containerd.runc.v2" in result.stderr
    assert "tasks.start" not in node.containerd.calls
    assert node.containerd.tasks == {}
    assert node.containerd.containers == {}


def test_taken_id_is_refused(node: Node) -> None:
    restorable(node)
    node.containerd.add("counter")
    result = node.run("restore", "i", "-d", status=4)
    assert "container counter exists" in result.stderr
    assert node.containerd.calls == []


def test_image_that_is_not_here_is_told(node: Node) -> None:
    save(node.checkpoints / "i")
    result = node.run("restore", "i", "-d", status=1)
    assert "image busybox:1 is not in containerd's namespace default" in result.stderr
    assert "ctr -n default images pull busybox:1" in result.stderr


def test_other_image_under_the_same_name_is_refused(node: Node) -> None:
    restorable(node, image_digest="sha256:" + "5" * 64)
    assert "but the container was created from sha256:5555" in node.run("restore", "i", "-d", status=4).stderr
    assert node.containerd.calls == []
    node.run("restore", "i", "-d", "--force")


def test_same_image_is_taken(node: Node) -> None:
    digest = node.containerd.add_image("busybox:1")
    restorable(node, image_digest=digest)
    node.run("restore", "i", "-d")


def test_unknown_image_has_to_be_named(node: Node) -> None:
    restorable(node, image="")
    assert "--image" in node.run("restore", "i", "-d", status=3).stderr
    node.run("restore", "i", "-d", "--image", "busybox:1")


def test_image_without_spec_is_told(node: Node) -> None:
    save(node.checkpoints / "i", spec=None)
    assert "kybernate-spec.json" in node.run("restore", "i", "-d", status=4).stderr


def test_container_of_a_pod_that_is_gone_is_refused(node: Node) -> None:
    network = {"type": "network", "path": "/run/netns/gone"}
    save(node.checkpoints / "i", spec=SPEC | {"linux": {"namespaces": [network]}})
    result = node.run("restore", "i", "-d", status=1)
    assert "network namespace /run/netns/gone" in result.stderr
    assert "restore it as a pod" in result.stderr
    assert node.containerd.calls == []


@pytest.mark.parametrize("argv", [("--log", "f"), ("--json",)])
def test_options_of_the_background_need_detach(node: Node, argv: tuple[str, ...]) -> None:
    assert "--detach" in node.run("restore", "i", *argv, status=2).stderr


def refused(node: Node, name: str = "i") -> str:
    """Run the restore of an image that must be refused before containerd hears of it, and return what it said."""
    stderr = node.run("restore", name, "-d", status=4).stderr
    assert node.containerd.calls == []
    return stderr


def test_unsigned_image_is_refused_with_what_it_asks_for(node: Node) -> None:
    spec = {
        **SPEC,
        "process": {"user": {"uid": 0}, "capabilities": {"bounding": ["CAP_SYS_ADMIN"]}},
        "mounts": [{"destination": "/host", "source": "/etc", "type": "bind", "options": ["rbind"]}],
    }
    save(node.checkpoints / "i", spec=spec, signed=False)
    said = refused(node)
    for words in (
        "the image is not signed",
        "capabilities: CAP_SYS_ADMIN",
        "mount of the node: /etc at /host",
        f"`kybernate import {node.checkpoints}/i`",
        "nothing was created",
    ):
        assert words in said


def test_image_of_another_nodes_key_is_refused(node: Node, tmp_path: Path) -> None:
    key = save(node.checkpoints / "i", key=Key(b"k" * 32, tmp_path / "k")).signature.key
    assert f"signed by key {key}, which is not valid here" in refused(node)


def test_changed_manifest_is_refused(node: Node) -> None:
    save(node.checkpoints / "i")
    manifest = node.checkpoints / "i" / NAME
    manifest.write_text(manifest.read_text().replace("/srv/data", "/"))
    assert "was changed after it was signed" in refused(node)


def test_changed_configuration_is_refused(node: Node) -> None:
    save(node.checkpoints / "i", spec={**SPEC, "root": {"path": "rootfs"}})
    file = node.checkpoints / "i" / "kybernate-spec.json"
    file.write_text(file.read_text().replace('"count"', '"/bin/"'))
    assert "kybernate-spec.json: digest blake2b:" in refused(node)


def test_configuration_that_the_manifest_does_not_list_is_never_read(node: Node) -> None:
    save(node.checkpoints / "i", spec=None)
    (node.checkpoints / "i" / "kybernate-spec.json").write_text(json.dumps(SPEC))
    assert "has no kybernate-spec.json" in refused(node)


def test_image_that_other_users_can_change_is_refused(node: Node) -> None:
    save(node.checkpoints / "i")
    (node.checkpoints / "i" / "pages-1.img").chmod(0o666)
    assert "other users can change the image" in refused(node)


def test_pods_image_is_restored_with_a_tenants_rights(node: Node) -> None:
    node.containerd.add_image("busybox:1", namespace="k8s.io")
    save(node.checkpoints / "shop" / "i", namespace="shop", pod="front", name="web")
    node.containerd.on_task = lambda namespace, id: node.shim(id, namespace=namespace).add(id, state="created")
    node.run("restore", "shop/i", "-d")
    spec = json.loads(node.containerd.containers["k8s.io", "counter"].spec.value)
    assert requester_of(Spec(spec)) == Requester("tenant", "shop", "front", "", "web")
    assert spec["root"]["path"] == "rootfs"


def test_pods_image_in_no_namespaces_directory_is_refused(node: Node) -> None:
    save(node.checkpoints / "i", namespace="shop", pod="front", name="web")
    said = refused(node)
    assert f"pods name images by their name below {node.checkpoints}/shop" in said
    assert f"`kybernate import {node.checkpoints}/i` moves it to its place" in said


def test_nothing_is_started_where_the_shim_would_not_read_the_annotation(node: Node, tmp_path: Path) -> None:
    settings = tmp_path / "shim.toml"
    settings.write_text(f"{settings.read_text()}annotations = []\n")
    save(node.checkpoints / "i")
    assert "does not allow kybernate.io/restore-from" in refused(node)


def test_configuration_of_an_encrypted_image_is_decrypted_and_compared(node: Node, tmp_path: Path) -> None:
    restorable(node)
    (tmp_path / "images.key").write_text("ab" * 32)
    (tmp_path / "images.key").chmod(0o600)
    node.run("encrypt", "i", "--key", str(tmp_path / "images.key"))
    assert "cannot be decrypted" in refused(node)
    settings = tmp_path / "shim.toml"
    settings.write_text(f'encryption_key = "{tmp_path}/images.key"\n{settings.read_text()}')
    assert node.json("images")[0]["usable"] is True
    assert "is encrypted" in node.run("import", "i", "--yes", status=1).stderr
    node.run("restore", "i", "-d")
    assert json.loads(node.containerd.containers["default", "counter"].spec.value)["process"] == SPEC["process"]


def test_container_that_has_ended_with_its_shim_was_restored_all_the_same(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its steps took is not known then; its status is, and nothing of it stays."""
    restorable(node)
    monkeypatch.setattr(stdio, "FIFOS", tmp_path / "fifo")
    node.containerd.exit_status = 3
    connect, connected = shims.shim_of, set[str]()

    @asynccontextmanager
    async def once(container: KnownContainer, address: str) -> AsyncIterator[shims.Shim]:
        connected.add(container.id)
        if "tasks.start" in node.containerd.calls:
            raise shims.ShimGone(f"the shim of {container.id} has ended")
        async with connect(container, address) as shim:
            yield shim

    for module in (shims, restore_verb):
        monkeypatch.setattr(module, "shim_of", once)
    node.run("restore", "i", status=3)
    assert connected == {"counter"}
    assert ("default", "counter") not in node.containerd.containers


def test_image_of_this_node_needs_no_library_of_the_store() -> None:
    program = "import sys, kybernate.cli.restore\nsys.exit(any(name in sys.modules for name in ('blake3', 'obstore')))"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
