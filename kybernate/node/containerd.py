"""containerd's API on its UNIX socket: who its containers are, and in which state their tasks.

Every call carries containerd's namespace. Its errors become facts here, so that no caller knows gRPC.
Source: containerd's api/services; CRI's labels from its pkg/cri/labels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from kybernate import addresses
from kybernate.messages import (
    containers_pb2,
    containers_pb2_grpc,
    namespaces_pb2,
    namespaces_pb2_grpc,
    tasks_pb2,
    tasks_pb2_grpc,
)
from kybernate.node.failure import Failure
from kybernate.node.lookup import KnownContainer, resolve
from kybernate_shim.address import GROUP_ANNOTATIONS
from kybernate_shim.messages import process_pb2

DEFAULT_ADDRESS = addresses.CONTAINERD
CALL_SECONDS = 20.0
MAX_MESSAGE = 16 << 20  # bytes, as containerd's own clients allow
POD, POD_NAMESPACE = "io.kubernetes.pod.name", "io.kubernetes.pod.namespace"
NAME, KIND = "io.kubernetes.container.name", "io.cri-containerd.kind"

Reply = TypeVar("Reply", bound=Message)


class ContainerdUnreachable(Failure):
    """No process answers on containerd's socket."""

    advice = "is containerd running? run as root, and name its socket with --address or CONTAINERD_ADDRESS"


class ContainerdRefused(Failure):
    """containerd answered a call with an error; `code` is gRPC's name of it, for example NOT_FOUND."""

    def __init__(self, message: str, *, code: str, state: str = "", advice: str = "") -> None:
        super().__init__(message, state=state, advice=advice)
        self.code = code


class Containerd:
    """A connection to containerd, closed at the end of a `with`."""

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        self.address = address.removeprefix("unix://")
        self.channel = grpc.insecure_channel(
            f"unix:{self.address}",
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE),
                ("grpc.default_authority", "localhost"),  # a socket's path is none, and Go's server refuses it
            ],
        )

    def __enter__(self) -> Containerd:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def call(
        self,
        method: Callable[..., Reply],
        request: Message,
        *,
        namespace: str = "",
        lease: str = "",
        timeout: float | None = CALL_SECONDS,
    ) -> Reply:
        """Make one unary call, in `namespace` and holding what it creates under `lease`, and return its reply.

        Raises ContainerdUnreachable and ContainerdRefused.
        """
        with translated(self.address):
            return method(request, metadata=metadata(namespace, lease), timeout=timeout)

    def namespaces(self) -> list[str]:
        """Return the names of all namespaces."""
        stub = namespaces_pb2_grpc.NamespacesStub(self.channel)
        reply = self.call(stub.List, namespaces_pb2.ListNamespacesRequest())
        return sorted(namespace.name for namespace in reply.namespaces)

    def containers(self, namespace: str = "") -> Iterator[KnownContainer]:
        """Yield the containers of a namespace, of all namespaces where it is empty, with their tasks' states."""
        for name in [namespace] if namespace else self.namespaces():
            tasks = self.tasks(name)
            stub = containers_pb2_grpc.ContainersStub(self.channel)
            reply = self.call(stub.List, containers_pb2.ListContainersRequest(), namespace=name)
            for record in reply.containers:
                yield described(name, record, tasks.get(record.id))

    def tasks(self, namespace: str) -> dict[str, process_pb2.Process]:
        """Return the tasks of a namespace by their containers' ids."""
        stub = tasks_pb2_grpc.TasksStub(self.channel)
        reply = self.call(stub.List, tasks_pb2.ListTasksRequest(), namespace=namespace)
        return {task.container_id or task.id: task for task in reply.tasks}

    def container(self, namespace: str, id: str) -> tuple[KnownContainer, Mapping[str, str]] | None:
        """Return the container of exactly this id, and the labels of its record; None where there is none."""
        stub = containers_pb2_grpc.ContainersStub(self.channel)
        try:
            record = self.call(stub.Get, containers_pb2.GetContainerRequest(id=id), namespace=namespace).container
        except ContainerdRefused as error:
            if error.code != "NOT_FOUND":
                raise
            return None
        return described(namespace, record, self.tasks(namespace).get(id)), dict(record.labels)

    def find(self, query: str, namespace: str = "") -> KnownContainer:
        """Return the container that `query` means, see `resolve`."""
        return resolve(query, self.containers(namespace))


def metadata(namespace: str, lease: str = "") -> tuple[tuple[str, str | bytes], ...]:
    """Return the headers that name the namespace and the lease of a call."""
    headers = {"containerd-namespace": namespace, "containerd-lease": lease}
    return tuple((name, value) for name, value in headers.items() if value)


@contextmanager
def translated(address: str) -> Iterator[None]:
    """Turn gRPC's errors into facts."""
    try:
        yield
    except grpc.RpcError as error:
        code, details = error.code(), error.details() or ""
        if code == grpc.StatusCode.UNAVAILABLE:
            cause = details.rpartition("last error: ")[2]
            raise ContainerdUnreachable(f"containerd does not answer on {address}: {cause}") from error
        raise ContainerdRefused(details or code.name, code=code.name) from error


def described(namespace: str, record: containers_pb2.Container, task: process_pb2.Process | None) -> KnownContainer:
    """Return what matters of containerd's record."""
    labels = record.labels
    return KnownContainer(
        namespace=namespace,
        id=record.id,
        image=record.image,
        runtime=record.runtime.name,
        snapshotter=record.snapshotter,
        group=group_of(record),
        pod_namespace=labels.get(POD_NAMESPACE, ""),
        pod=labels.get(POD, ""),
        name=labels.get(NAME, ""),
        sandbox=labels.get(KIND) == "sandbox",
        state=process_pb2.Status.Name(task.status).lower() if task else "",
        pid=task.pid if task else 0,
    )


def group_of(record: containers_pb2.Container) -> str:
    """Return the id under which the container shares a shim with others; its own where it has none."""
    annotations = spec_of(record).get("annotations")
    if not isinstance(annotations, dict):
        return record.id
    return next((str(annotations[name]) for name in GROUP_ANNOTATIONS if annotations.get(name)), record.id)


def spec_of(record: containers_pb2.Container) -> Mapping[str, Any]:
    """Return the record's OCI spec; an empty one where it is not JSON, as that of a sandbox of another kind."""
    try:
        spec = json.loads(record.spec.value or b"{}")
    except ValueError:
        return {}
    return spec if isinstance(spec, dict) else {}
