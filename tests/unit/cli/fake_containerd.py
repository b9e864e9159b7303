"""containerd's API in this process, on a UNIX socket: real gRPC, and a memory instead of containers.

It keeps what clients create and delete, refuses what containerd would refuse, and fails where a test asks it to.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message

from kybernate.messages import (
    containers_pb2,
    containers_pb2_grpc,
    content_pb2,
    content_pb2_grpc,
    diff_pb2,
    diff_pb2_grpc,
    images_pb2,
    images_pb2_grpc,
    leases_pb2,
    leases_pb2_grpc,
    namespaces_pb2,
    namespaces_pb2_grpc,
    snapshots_pb2,
    snapshots_pb2_grpc,
    tasks_pb2,
    tasks_pb2_grpc,
)
from kybernate_shim.messages import process_pb2
from kybernate_shim.messages.any import OCI_SPEC, pack_json
from kybernate_shim.messages.types_pb2 import Descriptor, Mount

PID = 4242
KYBERNATE = "io.containerd.kybernate.v1"


class FakeContainerd:
    """`calls` has the name of every call but the looks, in order; `failures` says which ones are refused, and how."""

    def __init__(self, socket: Path) -> None:
        self.address = str(socket)
        self.containers: dict[tuple[str, str], containers_pb2.Container] = {}
        self.tasks: dict[tuple[str, str], process_pb2.Process] = {}
        self.images: dict[tuple[str, str], Descriptor] = {}
        self.blobs: dict[str, bytes] = {}
        self.snapshots: dict[str, str] = {}
        self.snapshot_labels: dict[str, dict[str, str]] = {}
        self.leases: set[str] = set()
        self.calls: list[str] = []
        self.failures: dict[str, tuple[grpc.StatusCode, str]] = {}
        self.most_bytes = 16 << 20  # of a message, as containerd's
        self.on_task: Callable[[str, str], object] = lambda namespace, id: None
        self.created: list[tasks_pb2.CreateTaskRequest] = []
        self.silent: set[tuple[str, str]] = set()  # containers whose shims do not answer
        self.exit_status = 0
        self.ended = threading.Event()  # what Wait waits for; a signal ends every container
        self.ended.set()
        self.waits = threading.Event()
        self.signals: list[int] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        for register, servicer in SERVICES:
            register(servicer(self), self._server)
        self._server.add_insecure_port(f"unix:{socket}")
        self._server.start()

    def close(self) -> None:
        self._server.stop(None).wait()

    def add(
        self,
        id: str,
        *,
        namespace: str = "default",
        runtime: str = KYBERNATE,
        state: str = "RUNNING",
        pod: str = "",
        name: str = "",
        kind: str = "container",
        sandbox: str = "",
        image: str = "",
        environment: str = "",
    ) -> None:
        """Add a container, with a task unless `state` is empty, and with CRI's labels where it belongs to a pod."""
        labels = {"io.kubernetes.pod.name": pod, "io.kubernetes.pod.namespace": "shop"} if pod else {}
        if pod:
            labels |= {"io.cri-containerd.kind": kind} | ({"io.kubernetes.container.name": name} if name else {})
        spec: dict[str, Any] = {"annotations": {"io.kubernetes.cri.sandbox-id": sandbox}} if sandbox else {}
        spec |= {"process": {"env": [f"BIG={environment}"]}} if environment else {}
        self.containers[namespace, id] = containers_pb2.Container(
            id=id,
            image=image,
            labels=labels,
            runtime=containers_pb2.Container.Runtime(name=runtime),
            spec=pack_json(OCI_SPEC, spec),
            snapshotter="overlayfs",
        )
        if state:
            self.tasks[namespace, id] = process_pb2.Process(id=id, pid=PID, status=process_pb2.Status.Value(state))

    def add_image(self, reference: str, *, namespace: str = "default", layers: int = 2) -> str:
        """Add an image of several layers behind an index; return its digest."""
        diffs = [f"sha256:{hashlib.sha256(bytes([layer])).hexdigest()}" for layer in range(layers)]
        config = self._put({"rootfs": {"type": "layers", "diff_ids": diffs}})
        entries = [{"mediaType": "layer", "digest": f"sha256:{layer}", "size": 10} for layer in range(layers)]
        manifest = self._put({"config": {"digest": config}, "layers": entries})
        platforms = [("arm64", "sha256:other"), ("amd64", manifest)]
        index = self._put(
            {"manifests": [{"digest": d, "platform": {"os": "linux", "architecture": a}} for a, d in platforms]}
        )
        self.images[namespace, reference] = Descriptor(media_type="index", digest=index, size=1)
        return index

    def _put(self, document: object) -> str:
        content = json.dumps(document).encode()
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        self.blobs[digest] = content
        return digest

    def note(self, name: str, context: grpc.ServicerContext) -> str:
        """Count a call that changes something, fail it where the test wants that, and return its namespace."""
        self.calls.append(name)
        if name in self.failures:
            context.abort(*self.failures[name])
        return namespace_of(context)


def namespace_of(context: grpc.ServicerContext) -> str:
    namespace = dict(context.invocation_metadata()).get("containerd-namespace")
    if not namespace:
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "namespace is required: failed precondition")
    return str(namespace)


def found(table: dict[Any, Any], key: Any, what: str, context: grpc.ServicerContext) -> Any:
    if key not in table:
        context.abort(grpc.StatusCode.NOT_FOUND, f'{what} "{key}": not found')
    return table[key]


class Service:
    """One of containerd's services, all of which share the memory of the fake."""

    def __init__(self, fake: FakeContainerd) -> None:
        self.fake = fake


class Namespaces(Service, namespaces_pb2_grpc.NamespacesServicer):
    def List(self, request: Message, context: grpc.ServicerContext) -> namespaces_pb2.ListNamespacesResponse:  # noqa: N802
        names = sorted({namespace for namespace, _ in self.fake.containers} | {"default"})
        return namespaces_pb2.ListNamespacesResponse(namespaces=[namespaces_pb2.Namespace(name=name) for name in names])


class Containers(Service, containers_pb2_grpc.ContainersServicer):
    def Get(self, request: Any, context: Any) -> Any:  # noqa: N802
        record = found(self.fake.containers, (namespace_of(context), request.id), "container", context)
        return self.fits(containers_pb2.GetContainerResponse(container=record), context)

    def ListStream(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        namespace = namespace_of(context)
        without = set(re.findall('id!="([^"]*)"', ",".join(request.filters)))
        among = re.findall('id~="([^"]*)"', ",".join(request.filters))
        for (where, id), record in sorted(self.fake.containers.items()):
            if where == namespace and id not in without and all(re.search(one, id) for one in among):
                yield self.fits(containers_pb2.ListContainerMessage(container=record), context)

    def fits(self, message: Message, context: Any) -> Message:
        """Return a message that is not too large; for others fail as a server in Go."""
        size, most = message.ByteSize(), self.fake.most_bytes
        if size > most:
            words = f"grpc: trying to send message larger than max ({size} vs. {most})"
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, words)
        return message

    def Create(self, request: Any, context: Any) -> Any:  # noqa: N802
        namespace = self.fake.note("containers.create", context)
        self.fake.containers[namespace, request.container.id] = request.container
        return containers_pb2.CreateContainerResponse(container=request.container)

    def Delete(self, request: Any, context: Any) -> Empty:  # noqa: N802
        key = (self.fake.note("containers.delete", context), request.id)
        found(self.fake.containers, key, "container", context)
        del self.fake.containers[key]
        return Empty()


class Tasks(Service, tasks_pb2_grpc.TasksServicer):
    def List(self, request: Any, context: Any) -> Any:  # noqa: N802
        namespace = namespace_of(context)
        while self.fake.silent and context.is_active():  # it waits for each shim in turn
            time.sleep(0.01)
        return tasks_pb2.ListTasksResponse(
            tasks=[task for (where, _), task in self.fake.tasks.items() if where == namespace]
        )

    def Get(self, request: Any, context: Any) -> Any:  # noqa: N802
        key = (namespace_of(context), request.container_id)
        task = found(self.fake.tasks, key, "task", context)
        if key in self.fake.silent:
            task = process_pb2.Process(container_id=task.container_id, id=task.id, status=process_pb2.UNKNOWN)
        return tasks_pb2.GetResponse(process=task)

    def Create(self, request: Any, context: Any) -> Any:  # noqa: N802
        namespace = self.fake.note("tasks.create", context)
        self.fake.created.append(request)
        id = request.container_id
        self.fake.tasks[namespace, id] = process_pb2.Process(id=id, status=process_pb2.CREATED)
        self.fake.on_task(namespace, id)
        return tasks_pb2.CreateTaskResponse(container_id=id)

    def Start(self, request: Any, context: Any) -> Any:  # noqa: N802
        key = (self.fake.note("tasks.start", context), request.container_id)
        task = found(self.fake.tasks, key, "task", context)
        task.status, task.pid = process_pb2.RUNNING, PID
        return tasks_pb2.StartResponse(pid=PID)

    def Wait(self, request: Any, context: Any) -> Any:  # noqa: N802
        key = (namespace_of(context), request.container_id)
        task = found(self.fake.tasks, key, "task", context)
        self.fake.waits.set()
        if not self.fake.ended.wait(20):
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no signal came")
        task.status = process_pb2.STOPPED
        return tasks_pb2.WaitResponse(exit_status=self.fake.exit_status)

    def Kill(self, request: Any, context: Any) -> Empty:  # noqa: N802
        key = (self.fake.note("tasks.kill", context), request.container_id)
        found(self.fake.tasks, key, "task", context)
        self.fake.signals.append(request.signal)
        self.fake.ended.set()
        return Empty()

    def Pause(self, request: Any, context: Any) -> Empty:  # noqa: N802
        key = (self.fake.note("tasks.pause", context), request.container_id)
        found(self.fake.tasks, key, "task", context).status = process_pb2.PAUSED
        return Empty()

    def Resume(self, request: Any, context: Any) -> Empty:  # noqa: N802
        key = (self.fake.note("tasks.resume", context), request.container_id)
        found(self.fake.tasks, key, "task", context).status = process_pb2.RUNNING
        return Empty()

    def Delete(self, request: Any, context: Any) -> Any:  # noqa: N802
        key = (self.fake.note("tasks.delete", context), request.container_id)
        if found(self.fake.tasks, key, "task", context).status == process_pb2.RUNNING:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "task must be stopped before deletion: running")
        del self.fake.tasks[key]
        return tasks_pb2.DeleteResponse(exit_status=self.fake.exit_status)


class Images(Service, images_pb2_grpc.ImagesServicer):
    def Get(self, request: Any, context: Any) -> Any:  # noqa: N802
        target = found(self.fake.images, (namespace_of(context), request.name), "image", context)
        return images_pb2.GetImageResponse(image=images_pb2.Image(name=request.name, target=target))


class Content(Service, content_pb2_grpc.ContentServicer):
    def Read(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        namespace_of(context)
        blob = found(self.fake.blobs, request.digest, "content", context)
        half = len(blob) // 2
        yield content_pb2.ReadContentResponse(data=blob[:half])
        yield content_pb2.ReadContentResponse(offset=half, data=blob[half:])


class Snapshots(Service, snapshots_pb2_grpc.SnapshotsServicer):
    def Stat(self, request: Any, context: Any) -> Any:  # noqa: N802
        namespace_of(context)
        parent = found(self.fake.snapshots, request.key, "snapshot", context)
        labels = self.fake.snapshot_labels.get(request.key, {})
        return snapshots_pb2.StatSnapshotResponse(
            info=snapshots_pb2.Info(name=request.key, parent=parent, labels=labels)
        )

    def List(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        namespace_of(context)
        infos = [snapshots_pb2.Info(name=name, kind=snapshots_pb2.ACTIVE) for name in self.fake.snapshots]
        yield snapshots_pb2.ListSnapshotsResponse(info=infos)

    def Prepare(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.fake.note("snapshots.prepare", context)
        if dict(context.invocation_metadata()).get("containerd-lease") not in self.fake.leases:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "collected as garbage, because no lease holds it")
        if request.parent:
            found(self.fake.snapshots, request.parent, "parent snapshot", context)
        self.fake.snapshots[request.key] = request.parent
        self.fake.snapshot_labels[request.key] = dict(request.labels)
        return snapshots_pb2.PrepareSnapshotResponse(mounts=[Mount(type="overlay", source=request.key)])

    def Commit(self, request: Any, context: Any) -> Empty:  # noqa: N802
        self.fake.note("snapshots.commit", context)
        self.fake.snapshots[request.name] = self.fake.snapshots.pop(request.key)
        return Empty()

    def Remove(self, request: Any, context: Any) -> Empty:  # noqa: N802
        self.fake.note("snapshots.remove", context)
        found(self.fake.snapshots, request.key, "snapshot", context)
        del self.fake.snapshots[request.key]
        return Empty()


class Diff(Service, diff_pb2_grpc.DiffServicer):
    def Apply(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.fake.note("diff.apply", context)
        return diff_pb2.ApplyResponse(applied=request.diff)


class Leases(Service, leases_pb2_grpc.LeasesServicer):
    def Create(self, request: Any, context: Any) -> Any:  # noqa: N802
        namespace_of(context)
        self.fake.leases.add(request.id)
        return leases_pb2.CreateResponse(lease=leases_pb2.Lease(id=request.id))

    def Delete(self, request: Any, context: Any) -> Empty:  # noqa: N802
        self.fake.leases.remove(request.id)
        return Empty()


SERVICES: list[tuple[Any, type[Service]]] = [
    (namespaces_pb2_grpc.add_NamespacesServicer_to_server, Namespaces),
    (containers_pb2_grpc.add_ContainersServicer_to_server, Containers),
    (tasks_pb2_grpc.add_TasksServicer_to_server, Tasks),
    (images_pb2_grpc.add_ImagesServicer_to_server, Images),
    (content_pb2_grpc.add_ContentServicer_to_server, Content),
    (snapshots_pb2_grpc.add_SnapshotsServicer_to_server, Snapshots),
    (diff_pb2_grpc.add_DiffServicer_to_server, Diff),
    (leases_pb2_grpc.add_LeasesServicer_to_server, Leases),
]
