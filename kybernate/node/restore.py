"""Make a container from a checkpoint image by containerd's API: record, snapshot, task. All of it, or nothing.

The shim restores by itself when the new container's spec says so; here is only what has to be there before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kybernate.messages import (
    containers_pb2,
    containers_pb2_grpc,
    images_pb2,
    images_pb2_grpc,
    tasks_pb2,
    tasks_pb2_grpc,
)
from kybernate.node import rootfs
from kybernate.node.containerd import Containerd, ContainerdRefused, described
from kybernate.node.failure import Failure
from kybernate.node.lookup import Container
from kybernate.node.reading import FileOdd, opened_directory, read_listed, require_listed
from kybernate.node.stdio import Stdio
from kybernate_shim.checkpoint.digests import DigestUnknown
from kybernate_shim.checkpoint.encrypted import read_file
from kybernate_shim.checkpoint.image import CheckpointInvalid, Image
from kybernate_shim.checkpoint.manifest import File
from kybernate_shim.cuda.vram.errors import VramError
from kybernate_shim.messages.any import OCI_SPEC, pack_json
from kybernate_shim.trust.keys import KeyUnusable
from kybernate_shim.undo import Undo

SAVED_SPEC = "kybernate-spec.json"  # in the image: config.json of the source's bundle, as containerd wrote it
MOST_SPEC = 16 << 20  # bytes
KEY_ADVICE = "the image is encrypted: the node needs its key (`encryption_key`)"
SIGKILL = 9
KILL_SECONDS = 10.0
RESTORED_FROM = "kybernate.io/restored-from"  # label of the new container


class SpecMissing(Failure):
    """The image does not say how its container was configured."""

    advice = "restore it into a container of your own: give that one the annotation kybernate.io/restore-from"


class IdTaken(Failure):
    """A container of that id exists."""

    advice = "choose another id with --name, or remove the container"


class RestoreFailed(Failure):
    """containerd or the shim could not bring the container back. What had been created is gone."""


@dataclass(frozen=True)
class Plan:
    """A container that is to be: everything that containerd is told about it."""

    namespace: str
    id: str
    checkpoint: Path
    spec: Mapping[str, Any]
    image: str
    runtime: str
    snapshotter: str


@dataclass(frozen=True)
class Prepared:
    """A container whose task is created, and which has no process yet."""

    container: Container
    start: Callable[[], int]  # brings the processes back and returns the first one's pid; raises RestoreFailed


def saved_spec(checkpoint: Image, encryption_key: Path | None = None) -> dict[str, Any]:
    """Return the OCI spec that the checkpoint image holds, with the digest that its manifest lists. Raises SpecMissing.

    The bytes that are compared are those that are parsed.
    """
    file = next((one for one in checkpoint.manifest.files if one.name == SAVED_SPEC), None)
    if file is None:
        raise SpecMissing(f"{checkpoint.path} has no {SAVED_SPEC}, so its container cannot be made again from it")
    try:
        spec = json.loads(_listed(checkpoint, file, encryption_key))
    except (FileOdd, DigestUnknown, VramError, OSError, ValueError, RecursionError) as error:
        raise SpecMissing(f"{checkpoint.path}: {SAVED_SPEC} cannot be used: {error}") from error
    except (KeyUnusable, CheckpointInvalid) as error:
        raise SpecMissing(f"{checkpoint.path}: {SAVED_SPEC} cannot be decrypted: {error}", advice=KEY_ADVICE) from error
    if not isinstance(spec, dict):
        raise SpecMissing(f"{checkpoint.path / SAVED_SPEC} is not an OCI spec")
    return spec


def _listed(checkpoint: Image, file: File, encryption_key: Path | None) -> bytes:
    """Return the content of a file that the manifest lists, after it was compared with its digest."""
    if checkpoint.manifest.encryption is None:
        with opened_directory(checkpoint.path) as directory:
            return read_listed(file, directory, most=MOST_SPEC)
    content = read_file(checkpoint, file.name, encryption_key)
    require_listed(file, content)
    return content


def image_digest(containerd: Containerd, namespace: str, image: str) -> str:
    """Return what an image reference stands for on this node; empty where containerd does not know it."""
    stub = images_pb2_grpc.ImagesStub(containerd.channel)
    try:
        found = containerd.call(stub.Get, images_pb2.GetImageRequest(name=image), namespace=namespace)
    except ContainerdRefused as error:
        if error.code not in ("NOT_FOUND", "INVALID_ARGUMENT"):
            raise
        return ""
    return found.image.target.digest


@contextmanager
def prepared(containerd: Containerd, plan: Plan, stdio: Stdio) -> Iterator[Prepared]:
    """Create snapshot, container and task. They stay when the block ends well, and are removed when it raises.

    Raises IdTaken, ImageMissing (see rootfs.py) and RestoreFailed.
    """
    if _taken(containerd, plan):
        raise IdTaken(f"container {plan.id} exists in containerd's namespace {plan.namespace}")
    with _true_state(plan), Undo() as undo:
        with rootfs.lease(containerd, plan.namespace) as lease:
            place = rootfs.Place(containerd, plan.namespace, plan.snapshotter, lease)
            mounts = rootfs.prepare(place, plan.image, plan.id)
            undo.callback(rootfs.remove, place, plan.id)
            container = _create_container(containerd, plan)
            undo.callback(_delete_container, containerd, container)
        request = tasks_pb2.CreateTaskRequest(
            container_id=plan.id,
            rootfs=mounts,
            stdin=stdio.stdin,
            stdout=stdio.stdout,
            stderr=stdio.stderr,
            terminal=stdio.terminal,
        )
        _task_call(containerd, plan, "Create", request)
        undo.callback(_delete_task, containerd, container)
        yield Prepared(
            replace(container, state="created"),
            lambda: int(_task_call(containerd, plan, "Start", tasks_pb2.StartRequest(container_id=plan.id)).pid),
        )
        undo.pop_all()


@contextmanager
def _true_state(plan: Plan) -> Iterator[None]:
    """Let a failure say that something is left, if that is so."""
    try:
        yield
    except Failure as error:
        if getattr(error, "__notes__", ()):
            error.state = f"not all of container {plan.id} was removed again; the checkpoint image is as it was"
        raise


def wait(containerd: Containerd, container: Container, *, timeout: float | None = None) -> int:
    """Return the exit status of the first process once it has ended, within `timeout` seconds."""
    stub = tasks_pb2_grpc.TasksStub(containerd.channel)
    request = tasks_pb2.WaitRequest(container_id=container.id)
    return containerd.call(stub.Wait, request, namespace=container.namespace, timeout=timeout).exit_status


def remove(containerd: Containerd, container: Container) -> None:
    """Remove a container that has ended: its task, its record and its snapshot."""
    _delete_task(containerd, container)
    _delete_container(containerd, container)
    rootfs.remove(rootfs.Place(containerd, container.namespace, container.snapshotter), container.id)


def kill(containerd: Containerd, container: Container, signal: int) -> None:
    """Send a signal to the first process; one that has ended is fine."""
    stub = tasks_pb2_grpc.TasksStub(containerd.channel)
    request = tasks_pb2.KillRequest(container_id=container.id, signal=signal, all=signal == SIGKILL)
    _unless_gone(lambda: containerd.call(stub.Kill, request, namespace=container.namespace))


def _taken(containerd: Containerd, plan: Plan) -> bool:
    stub = containers_pb2_grpc.ContainersStub(containerd.channel)
    request = containers_pb2.GetContainerRequest(id=plan.id)
    return _unless_gone(lambda: containerd.call(stub.Get, request, namespace=plan.namespace))


def _create_container(containerd: Containerd, plan: Plan) -> Container:
    record = containers_pb2.Container(
        id=plan.id,
        image=plan.image,
        labels={RESTORED_FROM: plan.checkpoint.name},
        runtime=containers_pb2.Container.Runtime(name=plan.runtime),
        spec=pack_json(OCI_SPEC, plan.spec),
        snapshotter=plan.snapshotter,
        snapshot_key=plan.id,
    )
    stub = containers_pb2_grpc.ContainersStub(containerd.channel)
    request = containers_pb2.CreateContainerRequest(container=record)
    reply = containerd.call(stub.Create, request, namespace=plan.namespace)
    return described(plan.namespace, reply.container, None)


def _task_call(containerd: Containerd, plan: Plan, method: str, request: Any) -> Any:
    """Call containerd's task service, which waits for the shim as long as that takes: its own deadlines count."""
    stub = tasks_pb2_grpc.TasksStub(containerd.channel)
    try:
        return containerd.call(getattr(stub, method), request, namespace=plan.namespace, timeout=None)
    except ContainerdRefused as error:
        raise RestoreFailed(
            f"cannot restore {plan.id} from {plan.checkpoint}: {error}",
            state=f"container {plan.id} was removed again; the checkpoint image is as it was",
            advice="`kybernate inspect --verify` checks the image; the shim's log names the file of CRIU's",
        ) from error


def _delete_task(containerd: Containerd, container: Container) -> None:
    """Delete the task; kill it first where it turns out to run."""
    stub = tasks_pb2_grpc.TasksStub(containerd.channel)
    request = tasks_pb2.DeleteTaskRequest(container_id=container.id)
    try:
        _unless_gone(lambda: containerd.call(stub.Delete, request, namespace=container.namespace))
    except ContainerdRefused:
        kill(containerd, container, SIGKILL)
        _unless_gone(lambda: wait(containerd, container, timeout=KILL_SECONDS))
        _unless_gone(lambda: containerd.call(stub.Delete, request, namespace=container.namespace))


def _delete_container(containerd: Containerd, container: Container) -> None:
    stub = containers_pb2_grpc.ContainersStub(containerd.channel)
    request = containers_pb2.DeleteContainerRequest(id=container.id)
    _unless_gone(lambda: containerd.call(stub.Delete, request, namespace=container.namespace))


def _unless_gone(call: Callable[[], object]) -> bool:
    """Make a call and tell whether there was something to act upon."""
    try:
        call()
    except ContainerdRefused as error:
        if error.code != "NOT_FOUND":
            raise
        return False
    return True
