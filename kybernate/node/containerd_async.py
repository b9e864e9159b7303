"""containerd's API for a program with an event loop: as `containerd.py`, with calls that are awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message

from kybernate.messages import (
    containers_pb2,
    containers_pb2_grpc,
    cri_runtime_pb2,
    cri_runtime_pb2_grpc,
    events_pb2,
    events_pb2_grpc,
    images_pb2,
    images_pb2_grpc,
    namespaces_pb2,
    namespaces_pb2_grpc,
    tasks_pb2,
    tasks_pb2_grpc,
    version_pb2,
    version_pb2_grpc,
)
from kybernate.node.containerd import (
    CALL_SECONDS,
    DEFAULT_ADDRESS,
    MAX_MESSAGE,
    TOO_LARGE,
    Containerd,
    ContainerdRefused,
    RecordTooLarge,
    metadata,
    translated,
)
from kybernate_shim.messages import process_pb2, types_pb2

Reply = TypeVar("Reply")
TASK_SECONDS = 5.0
CRI_NAMESPACE = "k8s.io"  # where containerd's CRI has the containers of pods
RECONNECT_MS = 1000  # the longest pause between two attempts to reach a containerd that is away


class AsyncContainerd:
    """A connection to containerd, closed at the end of an `async with`. It outlives restarts of containerd.

    Calls raise ContainerdUnreachable and ContainerdRefused.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        self.address = address.removeprefix("unix://")
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE),
            ("grpc.default_authority", "localhost"),  # a socket's path is none, and Go's server refuses it
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", RECONNECT_MS),
        ]
        # One for each kind of call: the stubs of generated code are untyped for asyncio.
        self._channel = grpc.aio.insecure_channel(f"unix:{self.address}", options=options)
        self._containers: Any = containers_pb2_grpc.ContainersStub(self._channel)
        self._images: Any = images_pb2_grpc.ImagesStub(self._channel)
        self._tasks: Any = tasks_pb2_grpc.TasksStub(self._channel)
        self._namespaces: Any = namespaces_pb2_grpc.NamespacesStub(self._channel)
        self._events: Any = events_pb2_grpc.EventsStub(self._channel)
        self._cri: Any = cri_runtime_pb2_grpc.RuntimeServiceStub(self._channel)
        self._version: Any = version_pb2_grpc.VersionStub(self._channel)

    async def __aenter__(self) -> AsyncContainerd:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def version(self) -> str:
        """Return containerd's version."""
        reply: version_pb2.VersionResponse = await self._call(self._version.Version, Empty())
        return reply.version

    async def namespaces(self) -> list[str]:
        """Return the names of all namespaces."""
        reply = await self._call(self._namespaces.List, namespaces_pb2.ListNamespacesRequest())
        return sorted(namespace.name for namespace in reply.namespaces)

    async def ids(self, namespace: str) -> list[str]:
        """Return the ids of all containers of a namespace."""

        def listed() -> list[str]:
            with Containerd(self.address) as containerd:
                return [id for id, _ in containerd.records(namespace)]

        return await asyncio.to_thread(listed)

    async def container(self, namespace: str, id: str) -> containers_pb2.Container | None:
        """Return a record, None where there is none. Raises RecordTooLarge."""
        try:
            reply = await self._found(self._containers.Get, containers_pb2.GetContainerRequest(id=id), namespace)
        except ContainerdRefused as error:
            if error.code == TOO_LARGE:
                raise RecordTooLarge(id) from error
            raise
        return reply.container if reply is not None else None

    async def image_of(self, namespace: str, id: str) -> tuple[str, str]:
        """Return a container's image, reference and digest; both empty where either is not known."""
        record = await self.container(namespace, id)
        if record is None or not record.image:
            return "", ""
        reply = await self._found(self._images.Get, images_pb2.GetImageRequest(name=record.image), namespace)
        return (record.image, reply.image.target.digest) if reply is not None else ("", "")

    async def task(self, namespace: str, id: str) -> process_pb2.Process | None:
        """Return a container's task, None where it has none. containerd asks its shim, which may not answer."""
        request = tasks_pb2.GetRequest(container_id=id)
        reply = await self._found(self._tasks.Get, request, namespace, timeout=TASK_SECONDS)
        return reply.process if reply is not None else None

    async def log_path(self, namespace: str, id: str) -> str:
        """Return the file to which a container's output is written, "" where that is in no file.

        Of a pod's container it is the one that the CRI's caller has named, of others the one of its task.
        """
        if namespace == CRI_NAMESPACE:
            request = cri_runtime_pb2.ContainerStatusRequest(container_id=id)
            if (reply := await self._found(self._cri.ContainerStatus, request, "")) is not None:
                return str(reply.status.log_path)
        task = await self.task(namespace, id)
        scheme, _, path = (task.stdout if task is not None else "").partition("://")
        return path.partition("?")[0] if scheme == "file" else ""

    async def forward(self, envelope: types_pb2.Envelope) -> None:
        """Publish an event."""
        request = events_pb2.ForwardRequest(envelope=envelope)
        await self._call(self._events.Forward, request, envelope.namespace)

    async def events(self, filters: Sequence[str]) -> AsyncGenerator[types_pb2.Envelope, None]:
        """Yield the events of all namespaces that match one of `filters`, until containerd ends."""
        stream = self._events.Subscribe(events_pb2.SubscribeRequest(filters=filters))
        try:
            while True:
                with translated(self.address):
                    envelope = await stream.read()
                if envelope is grpc.aio.EOF:
                    return
                yield envelope
        finally:
            stream.cancel()

    async def ready(self, seconds: float) -> bool:
        """Wait until containerd can be reached, at most so long; return whether it can."""
        try:
            await asyncio.wait_for(self._channel.channel_ready(), seconds)
        except TimeoutError:
            return False
        return True

    async def _call(
        self,
        method: Callable[..., Awaitable[Reply]],
        request: Message,
        namespace: str = "",
        timeout: float = CALL_SECONDS,
    ) -> Reply:
        with translated(self.address):
            return await method(request, metadata=metadata(namespace), timeout=timeout)

    async def _found(
        self, method: Callable[..., Awaitable[Reply]], request: Message, namespace: str, timeout: float = CALL_SECONDS
    ) -> Reply | None:
        try:
            return await self._call(method, request, namespace, timeout)
        except ContainerdRefused as error:
            if error.code == grpc.StatusCode.NOT_FOUND.name:
                return None
            raise
