"""Nothing that a checkpoint writes can be read or replaced by another user of the node."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.empty_pb2 import Empty

from kybernate.node import exposed
from kybernate_shim.config import Config
from kybernate_shim.messages import runc_options_pb2 as runc
from kybernate_shim.messages import task_pb2 as wire
from kybernate_shim.messages.any import pack
from kybernate_shim.ttrpc import RpcError
from tests.hostile.readable import entered, readable
from tests.hostile.tenant import Tenant
from tests.system.checkpoints import TASK, ask, kybernate, refused
from tests.system.cri import Pod
from tests.system.ctr import BUNDLES, run

SECRET = "a-tenants-secret"
NAMESPACE = "k8s.io"
COUNT = ("sh", "-c", "echo ready; i=0; while :; do i=$((i+1)); sleep 0.05; done")
WORK = Path("/var/lib/kybernate/work")
RUN, STATE = Path("/run/kybernate"), Path("/var/lib/kybernate")


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory of root's that any user can enter."""
    directory = Path("/srv/images")
    directory.mkdir(parents=True, mode=0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def pod(tenant: Tenant) -> Pod:
    return tenant.pod()


@pytest.fixture
def container(tenant: Tenant, pod: Pod) -> str:
    """A tenant's container with a secret in its environment and so in its memory."""
    id = tenant.cri.run(pod, "app", COUNT, env={"TOKEN": SECRET})
    tenant.cri.await_log(pod, "app", "ready")
    return id


def checkpoint(container: str, image: Path) -> None:
    kybernate("checkpoint", "--namespace", NAMESPACE, container, str(image))


def task_checkpoint(pod: Pod, container: str, image: Path) -> None:
    """Checkpoint through the Task service, with the options that `ctr tasks checkpoint --image-path` has it sent."""
    options = pack(runc.CheckpointOptions(image_path=str(image)))
    request = wire.CheckpointTaskRequest(id=container, path="/nowhere", options=options)
    ask(NAMESPACE, pod.id, lambda client: client.call(TASK, "Checkpoint", request, Empty, timeout=60))


def assert_closed(container: str, image: Path) -> None:
    """No other user can read a file of the image, nor what the shim has written elsewhere, were the way there open."""
    work = WORK / f"{NAMESPACE}.{container}.checkpoint"
    bundle = BUNDLES / NAMESPACE / container
    files = [path for path in bundle.iterdir() if path.name.startswith("kybernate") or path.name == "address"]
    assert {"pages-1.img", "dump.log", "kybernate-spec.json"} <= {path.name for path in image.iterdir()}
    assert SECRET in (image / "kybernate-spec.json").read_text()
    for place in (image, work):
        assert not readable(place)
        with entered(place / "file"):
            assert not readable(*place.iterdir())
    with entered(*files):
        assert not readable(*files)
    assert not readable(RUN, *STATE.iterdir())  # the lab has made STATE itself


def test_new_directory_of_the_command_line(container: str, place: Path) -> None:
    checkpoint(container, place / "new")
    assert_closed(container, place / "new")


def test_existing_directory_that_others_can_read_is_closed(container: str, place: Path) -> None:
    (place / "old").mkdir(mode=0o755)
    checkpoint(container, place / "old")
    assert_closed(container, place / "old")


def test_directory_that_a_client_of_containerd_names(container: str, pod: Pod, place: Path) -> None:
    (place / "ctr").mkdir(mode=0o755)
    task_checkpoint(pod, container, place / "ctr")
    assert_closed(container, place / "ctr")


def test_directory_with_files_of_others_is_not_closed_and_not_used(container: str, pod: Pod, place: Path) -> None:
    shared = place / "shared"
    shared.mkdir(mode=0o755)
    (shared / "report").write_text("for everybody")
    with pytest.raises(RpcError, match=f"chmod 0700 {shared}"):
        task_checkpoint(pod, container, shared)
    assert [path.name for path in shared.iterdir()] == ["report"]
    assert shared.stat().st_mode & 0o777 == 0o755


def test_link_in_place_of_the_image_directory_is_refused(container: str, place: Path) -> None:
    (place / "target").mkdir(mode=0o700)
    (place / "link").symlink_to(place / "target")
    assert "is a link" in refused("kybernate", "checkpoint", "--namespace", NAMESPACE, container, str(place / "link"))
    assert not list((place / "target").iterdir())


@pytest.mark.parametrize(("mode", "owner"), [(0o775, 0), (0o777, 0), (0o755, 65534)])
def test_directory_of_other_users_is_refused(container: str, place: Path, mode: int, owner: int) -> None:
    """Its owner could exchange the image for another one, or read it while it is written."""
    place.chmod(mode)
    os.chown(place, owner, 0)
    error = refused("kybernate", "checkpoint", "--namespace", NAMESPACE, container, str(place / "image"))
    assert str(place) in error
    assert ("chown root" if owner else "chmod go-w") in error
    assert not list(place.iterdir())


def test_statistics_that_containerd_wants_are_closed(container: str, place: Path) -> None:
    """A checkpoint leaves CRIU's log and statistics in containerd's own directory for the container."""
    checkpoint(container, place / "new")
    left = [path for path in Path("/var/lib/containerd").rglob("dump.log") if container in str(path)]
    assert left
    for path in left:
        with entered(path):
            assert not readable(path)


def test_modes_in_a_restored_container_are_those_of_a_fresh_one(tenant: Tenant, place: Path) -> None:
    """The umask of a checkpoint is no part of what programs see: devices, mount points, new files."""
    look = "for p in /dev /dev/null /dev/shm /tmp /etc/hosts /new/mount /proc/self; do stat -c '%a %n' $p; done; umask"
    pod, second = tenant.pod(), tenant.pod()
    options, others = ({"mounts": [tenant.mounted(tenant.empty_dir(one), "/new/mount")]} for one in (pod, second))
    first = tenant.cri.run(pod, "app", COUNT, **options)
    fresh = tenant.cri.exec(first, "sh", "-c", look)
    image = Path("/var/lib/kybernate/checkpoints") / tenant.namespace / "modes"
    checkpoint(first, image)
    try:
        again = restored(tenant, second, image, **others)
        assert tenant.cri.exec(again, "sh", "-c", look) == fresh
        work = WORK / f"{NAMESPACE}.{again}.restore"
        with entered(work / "file"):
            assert not readable(*work.iterdir())
    finally:
        shutil.rmtree(image)


def restored(tenant: Tenant, pod: Pod, image: Path, **options: object) -> str:
    return tenant.cri.run(pod, "app", COUNT, annotations={"kybernate.io/restore-from": image.name}, **options)


def test_doctor_finds_open_images_and_closes_them(container: str, no_helper: None) -> None:
    """Images of older releases are in the checkpoint root with the modes that these gave them."""
    root = Path("/var/lib/kybernate/checkpoints")
    checkpoint(container, root / "old")
    try:
        root.parent.chmod(0o755)
        root.chmod(0o755)
        for path in (root / "old", *(root / "old").iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)
        (root / "old" / "link").symlink_to("/etc/passwd")
        before = Path("/etc/passwd").stat()
        assert str(root / "old" / "pages-1.img") in readable(root)
        found = {one.path for one in exposed.find(Config.load())}
        assert {str(root / "old"), str(root / "old" / "pages-1.img")} <= found
        report = json.loads(kybernate("doctor", "--fix", "--json", status=None))
        said = [(one["verdict"], one["found"]) for one in report if one["subject"] == "files"]
        assert any(verdict == "ok" and str(root / "old") in text for verdict, text in said), said
        assert not readable(root)
        assert not exposed.find(Config.load())
        assert Path("/etc/passwd").stat() == before
    finally:
        shutil.rmtree(root / "old")


def test_plain_checkpoint_of_containerd_works(container: str) -> None:
    """containerd has its own directory in /tmp, which is its alone though any user can write to /tmp."""
    name = run(["ctr", "-n", NAMESPACE, "tasks", "checkpoint", container]).strip()
    run(["ctr", "-n", NAMESPACE, "images", "rm", name])
