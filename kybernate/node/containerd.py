"""containerd's API on its UNIX socket: who its containers are, and in which state their tasks.

Every call carries containerd's namespace. Its errors become facts here, so that no caller knows gRPC.
Source: containerd's api/services; CRI's labels from its pkg/cri/labels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

import grpc
from google.protobuf.message import Message

from kybernate import addresses
from kybernate.messages import (
    containers_pb2,
    containers_pb2_grpc,
    namespaces_pb2,
    namespaces_pb2_grpc,
    snapshots_pb2,
    snapshots_pb2_grpc,
    tasks_pb2,
    tasks_pb2_grpc,
)
from kybernate.messages.agent_pb2 import Container
from kybernate.node.failure import Failure
from kybernate.node.hidden_records import hidden
from kybernate.node.lookup import KnownContainer, resolve
from kybernate.node.specs import Spec, spec_of
from kybernate.node.task_list import tasks_of
from kybernate_shim.address import GROUP_ANNOTATIONS
from kybernate_shim.messages import process_pb2

DEFAULT_ADDRESS = addresses.CONTAINERD
CALL_SECONDS = 20.0
LIST_SECONDS = 120.0  # the records of a node may be gigabytes: their environments are the tenants' own
MAX_MESSAGE = 16 << 20  # bytes, as containerd's own clients allow, and as it sends without `max_send_message_size`
TOO_LARGE = grpc.StatusCode.RESOURCE_EXHAUSTED.name  # how either side of gRPC refuses a message for its size
SNAPSHOTTER = "overlayfs"
ATTEMPTS = 3  # lists that fail for a record that is gone when it is searched for
POD, POD_NAMESPACE = "io.kubernetes.pod.name", "io.kubernetes.pod.namespace"
POD_UID = "io.kubernetes.pod.uid"
NAME, KIND = "io.kubernetes.container.name", "io.cri-containerd.kind"
STATES: Final[dict[process_pb2.Status, Container.State]] = {
    process_pb2.CREATED: Container.CREATED,
    process_pb2.RUNNING: Container.RUNNING,
    process_pb2.STOPPED: Container.STOPPED,
    process_pb2.PAUSED: Container.PAUSED,
    process_pb2.PAUSING: Container.PAUSING,
}

Reply = TypeVar("Reply", bound=Message)


class ContainerdUnreachable(Failure):
    """No process answers on containerd's socket."""

    advice = "is containerd running? run as root, and name its socket with --address or CONTAINERD_ADDRESS"


class ContainerdRefused(Failure):
    """containerd answered a call with an error; `code` is gRPC's name of it, for example NOT_FOUND."""

    def __init__(self, message: str, *, code: str, state: str = "", advice: str = "") -> None:
        super().__init__(message, state=state, advice=advice)
        self.code = code


class RecordTooLarge(Failure):
    """containerd cannot send the record of a container: it is larger than a message may be."""

    advice = (
        "its environment, labels and annotations are too large: make them smaller,"
        " containerd's `max_send_message_size` is the limit"
    )

    def __init__(self, id: str) -> None:
        super().__init__(f"containerd's record of container {id} is larger than one of its messages may be")


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
            for id, record in self.records(name, tasks):
                yield described(name, record, tasks.get(id)) if record else nameless(name, id, tasks.get(id))

    def records(
        self, namespace: str, tasks: Collection[str] | None = None
    ) -> Iterator[tuple[str, containers_pb2.Container | None]]:
        """Yield the id and the record of each container of a namespace; None for one that is larger than a message.

        Each record comes in a message of its own, because one of all would have the size of all tenants' environments.
        containerd ends such a list at the first record that it cannot send, and does not name it. Then those that are
        missing are read one by one, by the names that tasks (`tasks`, or else all) and snapshots have, or searched
        for where it has neither, and the list is read without those that are too large.
        """
        seen: set[str] = set()
        too_large: set[str] = set()
        snapshotters = {SNAPSHOTTER}
        vanished = 0
        while True:
            try:
                for record in self._streamed(namespace, too_large):
                    snapshotters.add(record.snapshotter)
                    if record.id not in seen:
                        seen.add(record.id)
                        yield record.id, record
                return
            except ContainerdRefused as error:
                if error.code != TOO_LARGE:
                    raise
                missing = self._names(namespace, snapshotters, tasks) - seen - too_large
                found = {id for id in missing if self._is_too_large(namespace, id)} or {
                    id for id in [self._searched(namespace, too_large)] if id is not None
                }
                vanished = 0 if found else vanished + 1
                if vanished == ATTEMPTS:
                    raise
            yield from ((id, None) for id in sorted(found))
            too_large |= found

    def _searched(self, namespace: str, without: Collection[str]) -> str | None:
        """Return a container whose record cannot be sent, by lists of ever fewer; None where it is gone."""

        def fails(expression: str) -> bool:
            try:
                for _ in self._streamed(namespace, without, f'id~="{expression}"'):
                    pass
            except ContainerdRefused as error:
                if error.code != TOO_LARGE:
                    raise
                return True
            return False

        return hidden(fails)

    def _streamed(
        self, namespace: str, without: Collection[str], *conditions: str
    ) -> Iterator[containers_pb2.Container]:
        stub = containers_pb2_grpc.ContainersStub(self.channel)
        expression = ",".join([*conditions, *(f'id!="{id}"' for id in sorted(without))])
        request = containers_pb2.ListContainersRequest(filters=[expression] if expression else [])
        with translated(self.address):
            for message in stub.ListStream(request, metadata=metadata(namespace), timeout=LIST_SECONDS):
                yield message.container

    def _names(self, namespace: str, snapshotters: Iterable[str], tasks: Collection[str] | None) -> set[str]:
        """Return names that containers may have: of tasks, and of snapshots, which CRI and ctr name after them."""
        stub = snapshots_pb2_grpc.SnapshotsStub(self.channel)
        names = set(self.tasks(namespace) if tasks is None else tasks)
        for snapshotter in filter(None, snapshotters):
            request = snapshots_pb2.ListSnapshotsRequest(snapshotter=snapshotter)
            with suppress(ContainerdRefused), translated(self.address):  # one that is not loaded has no snapshots
                for answer in stub.List(request, metadata=metadata(namespace), timeout=LIST_SECONDS):
                    names |= {info.name for info in answer.info if info.kind == snapshots_pb2.ACTIVE}
        return names

    def _is_too_large(self, namespace: str, id: str) -> bool:
        try:
            self._record(namespace, id)
        except RecordTooLarge:
            return True
        return False

    def tasks(self, namespace: str) -> dict[str, process_pb2.Process]:
        """Return the tasks of a namespace by their containers' ids; UNKNOWN where a shim does not answer."""
        with translated(self.address):
            return tasks_of(tasks_pb2_grpc.TasksStub(self.channel), lambda: self._ids(namespace), metadata(namespace))

    def task(self, namespace: str, id: str) -> process_pb2.Process | None:
        """Return the task of a container, None where it has none."""
        stub = tasks_pb2_grpc.TasksStub(self.channel)
        try:
            return self.call(stub.Get, tasks_pb2.GetRequest(container_id=id), namespace=namespace).process
        except ContainerdRefused as error:
            if error.code != "NOT_FOUND":
                raise
            return None

    def pause(self, namespace: str, id: str) -> None:
        """Freeze a container. Raises ContainerdRefused."""
        stub = tasks_pb2_grpc.TasksStub(self.channel)
        self.call(stub.Pause, tasks_pb2.PauseTaskRequest(container_id=id), namespace=namespace)

    def resume(self, namespace: str, id: str) -> None:
        """Let a frozen container run. Raises ContainerdRefused."""
        stub = tasks_pb2_grpc.TasksStub(self.channel)
        self.call(stub.Resume, tasks_pb2.ResumeTaskRequest(container_id=id), namespace=namespace)

    def _ids(self, namespace: str) -> list[str]:
        return [id for id, _ in self.records(namespace, ())]

    def container(self, namespace: str, id: str) -> tuple[KnownContainer, Mapping[str, str]] | None:
        """Return the container of exactly this id, and the labels of its record; None where there is none.

        Raises RecordTooLarge.
        """
        record = self._record(namespace, id)
        if record is None:
            return None
        return described(namespace, record, self.task(namespace, id)), dict(record.labels)

    def _record(self, namespace: str, id: str) -> containers_pb2.Container | None:
        stub = containers_pb2_grpc.ContainersStub(self.channel)
        try:
            return self.call(stub.Get, containers_pb2.GetContainerRequest(id=id), namespace=namespace).container
        except ContainerdRefused as error:
            if error.code == TOO_LARGE:
                raise RecordTooLarge(id) from error
            if error.code != "NOT_FOUND":
                raise
            return None

    def find(self, query: str, namespace: str = "") -> KnownContainer:
        """Return the container that `query` means, see `resolve`. Raises RecordTooLarge.

        By a whole id, no other record is read.
        """
        names = [namespace] if namespace else self.namespaces()
        exact = [found[0] for name in names if query and (found := self.container(name, query)) is not None]
        one = resolve(query, exact or self.containers(namespace))
        if one.problem:
            raise RecordTooLarge(one.id)
        return one


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


def described(
    namespace: str,
    record: containers_pb2.Container,
    task: process_pb2.Process | None,
    spec: Spec | None = None,
) -> KnownContainer:
    """Return what matters of containerd's record; `spec` is what `spec_of` says of it, where that is known already."""
    labels = record.labels
    return KnownContainer(
        namespace=namespace,
        id=record.id,
        image=record.image,
        runtime=record.runtime.name,
        snapshotter=record.snapshotter,
        group=group_of(record.id, spec_of(record) if spec is None else spec),
        pod_namespace=labels.get(POD_NAMESPACE, ""),
        pod=labels.get(POD, ""),
        name=labels.get(NAME, ""),
        pod_uid=labels.get(POD_UID, ""),
        sandbox=labels.get(KIND) == "sandbox",
        state=_state(task),
        pid=task.pid if task else 0,
    )


def _state(task: process_pb2.Process | None) -> Container.State:
    return STATES.get(task.status, Container.UNKNOWN) if task else Container.NO_TASK


def nameless(namespace: str, id: str, task: process_pb2.Process | None) -> KnownContainer:
    """Return what is known of a container whose record containerd cannot send."""
    return KnownContainer(
        namespace=namespace,
        id=id,
        state=_state(task),
        pid=task.pid if task else 0,
        problem=str(RecordTooLarge(id)),
    )


def group_of(id: str, spec: Spec) -> str:
    """Return the id under which a container shares a shim with others; its own where it has none."""
    annotations = spec.get("annotations")
    if not isinstance(annotations, dict):
        return id
    return next((str(annotations[name]) for name in GROUP_ANNOTATIONS if annotations.get(name)), id)
