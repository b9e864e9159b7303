"""`kybernate.shim.v1.Shim`: what the node agent and the command line ask of a shim beside containerd's Task service."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from kybernate_shim.messages import shim_pb2 as wire
from kybernate_shim.task.container import Container
from kybernate_shim.task.service import TaskService, translated
from kybernate_shim.ttrpc import Code, Method, RpcError

if TYPE_CHECKING:
    from kybernate_shim.checkpoint.operation import Operation

SERVICE = "kybernate.shim.v1.Shim"


class ShimService:
    """The same containers as those of `tasks`, which it asks for them."""

    def __init__(self, tasks: TaskService) -> None:
        self._tasks = tasks

    def methods(self) -> dict[str, Method]:
        return {
            "Checkpoint": Method(wire.CheckpointRequest, translated(self.checkpoint, self._tasks.log)),
            "Suspend": Method(wire.SuspendRequest, translated(self.suspend, self._tasks.log)),
            "Resume": Method(wire.ResumeRequest, translated(self.resume, self._tasks.log)),
            "Status": Method(wire.StatusRequest, translated(self.status, self._tasks.log)),
        }

    async def checkpoint(self, request: wire.CheckpointRequest) -> Message:
        """Write an image to a directory of the client's choice, relative names below the checkpoint root."""
        container = self._tasks.container(request.id)
        if not request.path:
            raise RpcError(Code.INVALID_ARGUMENT, "path: the directory for the image is missing: invalid argument")
        from kybernate_shim.task.checkpointing import from_shim_service, response, work_directory  # on use

        work = work_directory(container.config, self._tasks.namespace, request.id, "checkpoint")
        try:
            wanted = from_shim_service(request, spec=container.spec, config=container.config, work=work)
        except ValueError as error:
            raise RpcError(Code.INVALID_ARGUMENT, f"{error}: invalid argument") from error
        dumped, operation = await container.checkpoint(wanted)
        return response(dumped, wanted, operation.seconds, operation.frozen_ms)

    async def suspend(self, request: wire.SuspendRequest) -> Message:
        """Move the container's VRAM into host memory."""
        from kybernate_shim.task.gpu_report import arena_message  # most are never suspended

        left, operation = await self._tasks.container(request.id).suspend(lock_seconds=request.timeout_ms / 1000)
        return wire.SuspendResponse(
            steps=_steps(operation), vram_bytes=left.vram_bytes, arena=arena_message(left.arena_use)
        )

    async def resume(self, request: wire.ResumeRequest) -> Message:
        """Move it back."""
        left, operation = await self._tasks.container(request.id).unsuspend(
            restore_seconds=request.timeout_ms / 1000, room_seconds=request.room_timeout_ms / 1000
        )
        return wire.ResumeResponse(steps=_steps(operation), vram_bytes=left.vram_bytes)

    async def status(self, request: wire.StatusRequest) -> Message:
        """Say what each container is doing; takes no lock, so it is answered in the middle of a checkpoint.

        Nothing is read of processes for that, unless the driver's word on them is wanted.
        """
        ids = [request.id] if request.id else list(self._tasks.containers)
        containers = [self._tasks.container(id) for id in ids]
        replies = [_status(container) for container in containers]
        if request.gpu:
            from kybernate_shim.task.gpu_report import (
                ask_driver,
            )  # the first container of a node waits for every import

            await asyncio.gather(*map(ask_driver, containers, replies))
        return wire.StatusResponse(containers=replies)


def _steps(operation: Operation) -> list[wire.Step]:
    return [
        wire.Step(name=step.name, seconds=step.seconds, bytes=step.bytes, spared_bytes=step.spared)
        for step in operation.steps
    ]


def _status(container: Container) -> wire.Container:
    reply = wire.Container(
        id=container.id,
        state=container.init.state,
        pid=container.init.pid,
        suspended=container.suspended,
        gpu=container.gpu.state,
    )
    if container.suspended and (use := container.arena_use) is not None:
        from kybernate_shim.task.gpu_report import arena_message  # as above

        reply.arena.CopyFrom(arena_message(use))
    operation = container.operation
    if operation is not None:
        reply.phase, reply.step = operation.verb, operation.step_name
        reply.done_bytes, reply.total_bytes = operation.done, operation.total_bytes
        reply.seconds = operation.seconds
    return reply
