"""Checkpoint: a container's processes, memory and files into an image."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kybernate.messages import agent_pb2 as wire
from kybernate.node.containerd import Containerd
from kybernate.node.failure import Invalid
from kybernate.node.lookup import KnownContainer
from kybernate.node.places import new_place, short_name
from kybernate.node.restore import image_digest
from kybernate.node.shim import Shim
from kybernate.verbs.evidence import Whole
from kybernate.verbs.model import Operation, Result, Target, steps_of
from kybernate.verbs.node import Node, of_containers, running
from kybernate.verbs.of_shims import OfShim
from kybernate.verbs.places import absolute, with_place
from kybernate.verbs.probes import ProbeLimit, limit_by_probes
from kybernate_shim.checkpoint.image.locate import NAME as IMAGE_NAME
from kybernate_shim.checkpoint.image.store import CheckpointInvalid, CheckpointNotFound, read_image
from kybernate_shim.messages import shim_pb2 as shim_wire

if TYPE_CHECKING:
    from kybernate.verbs.attempt import Attempt

TCP = ("", "close", "established")


@dataclass(frozen=True)
class Checkpoint(OfShim):
    """`name` is a container as a person names it; `path` a name for the image, a directory, or empty.

    `hold_timeout` is in seconds, 0 as configured.
    `max_freeze` is the most seconds for which it may be frozen, 0 for what its pod or the node says.
    """

    verb = "checkpoint"
    call = "Operations/Checkpoint"
    request = wire.CheckpointRequest
    renamed = {"max_freeze": "max_freeze_seconds"}  # noqa: RUF012  # a ClassVar of the base

    path: str = ""
    exit: bool = False
    tcp: str = ""
    without_rootfs: bool = False
    force: bool = False
    hold: bool = False
    hold_timeout: float = 0
    volumes: str = ""
    max_freeze: float = 0

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.tcp not in TCP:
            yield "tcp", "is neither `close` nor `established`"

    def resolve(self, node: Node, id: str) -> Target:
        container = running(node, self.name, self.namespace)
        path = self.path or (f"{short_name(container)}-{id}" if id else "")
        if path and "/" not in path and not IMAGE_NAME.fullmatch(path):
            raise Invalid(f"{path!r} is not the name of an image", state="no operation was started")
        place = new_place(container, absolute(path) if "/" in path else path)
        return with_place(of_containers(node, container), image=place, writes=place)

    async def call_shim(self, shim: Shim, container: KnownContainer, attempt: Attempt) -> Result:
        operation = attempt.operation
        request = await asyncio.to_thread(self._request, attempt, container)
        reply = await shim.checkpoint(request)
        return await asyncio.to_thread(self._result, operation, reply)

    def image_of(self, operation: Operation) -> Whole | None:
        """Return the image at the checkpoint's place, if it is whole and of the container."""
        try:
            image = read_image(Path(operation.target.image))
        except (CheckpointNotFound, CheckpointInvalid, OSError):
            return None
        if image.manifest.source.container != operation.target.container:
            return None
        return Whole(image.manifest, image.digest)

    def _request(self, attempt: Attempt, container: KnownContainer) -> shim_wire.CheckpointRequest:
        node, operation = attempt.node, attempt.operation
        with Containerd(node.address) as containerd:
            digest = image_digest(containerd, container.namespace, container.image)
        limit = ProbeLimit(self.max_freeze)
        if not self.max_freeze and container.pod:
            pod = node.pod_of(container.pod_namespace, container.pod)
            limit = limit_by_probes(pod, container.name, time.time())
        return shim_wire.CheckpointRequest(
            id=container.id,
            path=operation.target.image,
            exit=self.exit,
            hold=self.hold,
            hold_seconds=self.hold_timeout,
            tcp=self.tcp,
            rootfs_diff=not self.without_rootfs,
            volumes=self.volumes,
            timeout_seconds=attempt.seconds,
            force=self.force,
            image=container.image,
            image_digest=digest,
            operation=operation.id,
            max_freeze_seconds=limit.seconds,
            max_freeze_from=limit.source,
        )

    def _result(self, operation: Operation, reply: shim_wire.CheckpointResponse) -> Result:
        whole = self.image_of(operation)
        return Result(
            path=reply.path,
            image_id=whole.manifest.id if whole else "",
            manifest_digest=reply.manifest_digest,
            bytes=reply.bytes,
            frozen_ms=reply.frozen_ms,
            seconds=reply.seconds,
            vram_bytes=sum(process.bytes for process in whole.manifest.cuda_processes) if whole else 0,
            steps=steps_of(reply.steps),
        )
