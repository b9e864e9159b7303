"""Make a container from a checkpoint image by containerd's API: record, snapshot, task. All of it, or nothing.

The shim restores by itself when the new container's spec says so; here is only what has to be there before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from kybernate.messages import (
    containers_pb2,
    containers_pb2_grpc,
    images_pb2,
    images_pb2_grpc,
    tasks_pb2,
    tasks_pb2_grpc,
)
from kybernate.messages.agent_pb2 import Container
from kybernate.node import rootfs
from kybernate.node.ahead import reading_ahead
from kybernate.node.containerd import Containerd, ContainerdRefused, described
from kybernate.node.failure import Failure, Refused
from kybernate.node.lookup import KnownContainer
from kybernate.node.reading import opened_directory, read_listed, require_listed
from kybernate.node.stdio import TaskStreams
from kybernate_shim import bounded_json, errors
from kybernate_shim.checkpoint.image.digests import FileUnreadable
from kybernate_shim.checkpoint.image.encrypted import read_file
from kybernate_shim.checkpoint.image.manifest import SAVED_SPEC, File
from kybernate_shim.checkpoint.image.store import CheckpointInvalid, Image
from kybernate_shim.messages.any import OCI_SPEC, pack_json
from kybernate_shim.undo import Undo
from kybernate_shim.vram_io.errors import VramError

MOST_SPEC = 16 << 20  # bytes
KEY_ADVICE = "the image is encrypted: the node needs its key (`encryption_key`)"
SIGKILL = 9
KILL_SECONDS = 10.0
RESTORED_FROM = "kybernate.io/restored-from"  # label of the new container


SPEC_MISSING_ADVICE: Final = "create a container yourself, with the annotation kybernate.io/restore-from"


ID_TAKEN_ADVICE: Final = "choose another id with --name, or remove the container"


class NotRestored(Failure):
    """containerd or the shim could not bring the container back. What had been created is gone."""


@dataclass(frozen=True)
class RestorePlan:
    """A container that is to be created: everything that is passed to containerd.

    `labels` are given to its record and to its snapshot, in addition to ours. The files `ahead` are read meanwhile.
    """

    namespace: str
    id: str
    checkpoint: Path
    spec: Mapping[str, Any]
    image: str
    runtime: str
    snapshotter: str
    labels: Mapping[str, str] = field(default_factory=dict)
    ahead: Sequence[Path] = ()


@dataclass(frozen=True)
class CreatedTask:
    """A container whose task is created, and which has no process yet."""

    container: KnownContainer
    start: Callable[[], int]  # brings the processes back and returns the first one's pid; raises RestoreFailed


def saved_spec(checkpoint: Image, encryption_key: Path | None = None) -> dict[str, Any]:
    """Return the OCI spec that the checkpoint image holds, with the digest that its manifest lists. Raises Refused.

    The bytes that are compared are those that are parsed.
    """
    file = next((one for one in checkpoint.manifest.files if one.name == SAVED_SPEC), None)
    if file is None:
        raise Refused(
            f"{checkpoint.path} has no {SAVED_SPEC}, so its container cannot be created again from it",
            advice=SPEC_MISSING_ADVICE,
        )
    try:
        spec = bounded_json.parse(_listed(checkpoint, file, encryption_key), most_bytes=MOST_SPEC)
    except (FileUnreadable, VramError, OSError, ValueError, RecursionError) as error:
        raise Refused(f"{checkpoint.path}: {SAVED_SPEC} cannot be used: {error}", advice=SPEC_MISSING_ADVICE) from error
    except (errors.Refused, CheckpointInvalid) as error:
        raise Refused(f"{checkpoint.path}: {SAVED_SPEC} cannot be decrypted: {error}", advice=KEY_ADVICE) from error
    if not isinstance(spec, dict):
        raise Refused(f"{checkpoint.path / SAVED_SPEC} is not an OCI spec", advice=SPEC_MISSING_ADVICE)
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
def prepared(containerd: Containerd, plan: RestorePlan, stdio: TaskStreams) -> Iterator[CreatedTask]:
    """Create snapshot, container and task. They stay when the block ends well, and are removed when it raises.

    Raises Refused, Failure (see rootfs.py) and RestoreFailed.
    """
    if _taken(containerd, plan):
        raise Refused(f"container {plan.id} exists in containerd's namespace {plan.namespace}", advice=ID_TAKEN_ADVICE)
    with _true_state(plan), Undo() as undo:
        with reading_ahead(plan.ahead):
            container = _created(containerd, plan, stdio, undo)
        yield CreatedTask(
            replace(container, state=Container.CREATED),
            lambda: int(_task_call(containerd, plan, "Start", tasks_pb2.StartRequest(container_id=plan.id)).pid),
        )
        undo.pop_all()


def _created(containerd: Containerd, plan: RestorePlan, stdio: TaskStreams, undo: Undo) -> KnownContainer:
    """Create snapshot, container and task, and note in `undo` how each is removed."""
    with rootfs.lease(containerd, plan.namespace) as lease:
        place = rootfs.SnapshotPlace(containerd, plan.namespace, plan.snapshotter, lease)
        mounts = rootfs.prepare(place, plan.image, plan.id, plan.labels)
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
    return container


@contextmanager
def _true_state(plan: RestorePlan) -> Iterator[None]:
    """Let a failure say that something is left, if that is so."""
    try:
        yield
    except Failure as error:
        if getattr(error, "__notes__", ()):
            error.state = f"not all of container {plan.id} was removed again; the checkpoint image is as it was"
        raise


def wait(containerd: Containerd, container: KnownContainer, *, timeout: float | None = None) -> int:
    """Return the exit status of the first process once it has ended, within `timeout` seconds."""
    stub = tasks_pb2_grpc.TasksStub(containerd.channel)
    request = tasks_pb2.WaitRequest(container_id=container.id)
    return containerd.call(stub.Wait, request, namespace=container.namespace, timeout=timeout).exit_status


def remove(containerd: Containerd, container: KnownContainer) -> None:
    """Remove a container that has ended: its task, its record and its snapshot."""
    _delete_task(containerd, container)
    _delete_container(containerd, container)
    rootfs.remove(rootfs.SnapshotPlace(containerd, container.namespace, container.snapshotter), container.id)


def kill(containerd: Containerd, container: KnownContainer, signal: int) -> None:
    """Send a signal to the first process; one that has ended is fine."""
    stub = tasks_pb2_grpc.TasksStub(containerd.channel)
    request = tasks_pb2.KillRequest(container_id=container.id, signal=signal, all=signal == SIGKILL)
    _unless_gone(lambda: containerd.call(stub.Kill, request, namespace=container.namespace))


def _taken(containerd: Containerd, plan: RestorePlan) -> bool:
    stub = containers_pb2_grpc.ContainersStub(containerd.channel)
    request = containers_pb2.GetContainerRequest(id=plan.id)
    return _unless_gone(lambda: containerd.call(stub.Get, request, namespace=plan.namespace))


def _create_container(containerd: Containerd, plan: RestorePlan) -> KnownContainer:
    record = containers_pb2.Container(
        id=plan.id,
        image=plan.image,
        labels={**plan.labels, RESTORED_FROM: plan.checkpoint.name},
        runtime=containers_pb2.Container.Runtime(name=plan.runtime),
        spec=pack_json(OCI_SPEC, plan.spec),
        snapshotter=plan.snapshotter,
        snapshot_key=plan.id,
    )
    stub = containers_pb2_grpc.ContainersStub(containerd.channel)
    request = containers_pb2.CreateContainerRequest(container=record)
    reply = containerd.call(stub.Create, request, namespace=plan.namespace)
    return described(plan.namespace, reply.container, None)


def _task_call(containerd: Containerd, plan: RestorePlan, method: str, request: Any) -> Any:
    """Call containerd's task service, which waits for the shim as long as that takes: its own deadlines count."""
    stub = tasks_pb2_grpc.TasksStub(containerd.channel)
    try:
        return containerd.call(getattr(stub, method), request, namespace=plan.namespace, timeout=None)
    except ContainerdRefused as error:
        raise NotRestored(
            f"cannot restore {plan.id} from {plan.checkpoint}: {error}",
            state=f"container {plan.id} was removed again; the checkpoint image is as it was",
            advice="`kybernate inspect --verify` checks the image; the shim's log names the file of CRIU's",
        ) from error


def _delete_task(containerd: Containerd, container: KnownContainer) -> None:
    """Delete the task; kill it first where it turns out to run."""
    stub = tasks_pb2_grpc.TasksStub(containerd.channel)
    request = tasks_pb2.DeleteTaskRequest(container_id=container.id)
    try:
        _unless_gone(lambda: containerd.call(stub.Delete, request, namespace=container.namespace))
    except ContainerdRefused:
        kill(containerd, container, SIGKILL)
        _unless_gone(lambda: wait(containerd, container, timeout=KILL_SECONDS))
        _unless_gone(lambda: containerd.call(stub.Delete, request, namespace=container.namespace))


def _delete_container(containerd: Containerd, container: KnownContainer) -> None:
    stub = containers_pb2_grpc.ContainersStub(containerd.channel)
    request = containers_pb2.DeleteContainerRequest(id=container.id)
    _unless_gone(lambda: containerd.call(stub.Delete, request, namespace=container.namespace))


def _unless_gone(call: Callable[[], object]) -> bool:
    """Make a call and return whether its object existed."""
    try:
        call()
    except ContainerdRefused as error:
        if error.code != "NOT_FOUND":
            raise
        return False
    return True
