"""Calls of containerd's Task service, and what a client sees of each: code and text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc

from kybernate.messages import containers_pb2 as container_messages
from kybernate.messages import snapshots_pb2 as snapshots
from kybernate.messages import tasks_pb2 as wire
from kybernate.messages.containers_pb2_grpc import ContainersStub
from kybernate.messages.snapshots_pb2_grpc import SnapshotsStub
from kybernate.messages.tasks_pb2_grpc import TasksStub
from tests.system.ctr import BUSYBOX, Ctr

SPEC_TYPE = "types.containerd.io/opencontainers/runtime-spec/1/Process"
RESOURCES_TYPE = "types.containerd.io/opencontainers/runtime-spec/1/LinuxResources"
SECONDS = 20
SLEEP = ["sleep", "1000"]

Said = tuple[str, str]  # the code's name and the text, without what differs from one container to the next
Edit = Callable[[dict[str, Any]], object]


class Node:
    """containerd's own API, as any client calls it, for containers under one runtime."""

    def __init__(self, runtime: str, channel: grpc.Channel) -> None:
        self.ctr = Ctr(runtime=runtime)
        self._metadata = (("containerd-namespace", self.ctr.namespace),)
        self.tasks, self._containers, self._snapshots = (
            TasksStub(channel),
            ContainersStub(channel),
            SnapshotsStub(channel),
        )

    @contextmanager
    def container(self, edit: Edit) -> Iterator[str]:
        """Make a container whose specification is edited, and remove it with whatever has become of it."""
        id = self.ctr.new_id()
        self.ctr("container", "create", "--runtime", self.ctr.runtime, BUSYBOX, id, *SLEEP)
        try:
            found = self._containers.Get(
                container_messages.GetContainerRequest(id=id), metadata=self._metadata
            ).container
            spec = json.loads(found.spec.value)
            edit(spec)
            found.spec.value = json.dumps(spec).encode()
            request = container_messages.UpdateContainerRequest(container=found)
            request.update_mask.paths.append("spec")
            self._containers.Update(request, metadata=self._metadata)
            yield id
        finally:
            self.ctr.remove(id)

    def create(self, id: str) -> Said:
        """Make the task of a container."""
        mounts = self._snapshots.Mounts(
            snapshots.MountsRequest(snapshotter="overlayfs", key=id), metadata=self._metadata
        ).mounts
        request = wire.CreateTaskRequest(container_id=id)
        for one in mounts:
            request.rootfs.add(type=one.type, source=one.source, target=one.target, options=one.options)
        return self.said("Create", request, id)

    def create_and_start(self, id: str) -> Said:
        made = self.create(id)
        return made if made[0] != "OK" else self.said("Start", wire.StartRequest(container_id=id), id)

    def said(self, method: str, request: Any, id: str, *, seconds: float = SECONDS) -> Said:
        """Call, and return what a client sees."""
        try:
            getattr(self.tasks, method)(request, metadata=self._metadata, timeout=seconds)
        except grpc.RpcError as error:
            return error.code().name, plain(error.details(), id)
        return "OK", ""

    def statuses(self, id: str) -> dict[str, int]:
        """Return the state of the task and of its exec `e`, where there are such."""
        found: dict[str, int] = {}
        for exec_id in ("", "e"):
            with suppress(grpc.RpcError):
                request = wire.GetRequest(container_id=id, exec_id=exec_id)
                found[exec_id] = self.tasks.Get(request, metadata=self._metadata, timeout=SECONDS).process.status
        return found

    def exec(self, id: str, exec_id: str, spec: dict[str, Any]) -> Said:
        """Add an exec and start it."""
        added = self.said("Exec", exec_request(id, exec_id, spec), id)
        started = wire.StartRequest(container_id=id, exec_id=exec_id)
        return added if added[0] != "OK" else self.said("Start", started, id)


def plain(text: str, id: str) -> str:
    """Return an error's text without what differs from one container, or one attempt, to the next."""
    return re.sub(r"\b[0-9a-f]{64}\b|\b\d{2,}\b", "N", text.replace(id, "ID"))


def exec_request(id: str, exec_id: str, spec: dict[str, Any]) -> wire.ExecProcessRequest:
    """Return a request to add an exec."""
    request = wire.ExecProcessRequest(container_id=id, exec_id=exec_id)
    request.spec.type_url = SPEC_TYPE
    whole = {"cwd": "/", "user": {"uid": 0, "gid": 0}, "env": ["PATH=/bin"], **spec}
    request.spec.value = json.dumps(whole).encode()
    return request
