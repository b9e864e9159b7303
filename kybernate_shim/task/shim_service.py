"""`kybernate.shim.v1.Shim`: the calls of the node agent and the command line, next to containerd's Task service."""

from __future__ import annotations

import asyncio

from google.protobuf.message import Message

from kybernate_shim.messages import shim_pb2 as wire
from kybernate_shim.task.container import Container
from kybernate_shim.task.outcomes import operation_id
from kybernate_shim.task.service import TaskService, translated
from kybernate_shim.trust.caller import CALLER
from kybernate_shim.ttrpc import Code, Method, RpcError


class ShimService:
    """The same containers as those of `tasks`, which it asks for them."""

    def __init__(self, tasks: TaskService) -> None:
        self._tasks = tasks

    def methods(self) -> dict[str, Method]:
        return {
            "Checkpoint": Method(wire.CheckpointRequest, translated(self.checkpoint, self._tasks.log)),
            "Release": Method(wire.ReleaseRequest, translated(self.release, self._tasks.log)),
            "Suspend": Method(wire.SuspendRequest, translated(self.suspend, self._tasks.log)),
            "Park": Method(wire.ParkRequest, translated(self.park, self._tasks.log)),
            "Resume": Method(wire.ResumeRequest, translated(self.resume, self._tasks.log)),
            "Cancel": Method(wire.CancelRequest, translated(self.cancel, self._tasks.log)),
            "Status": Method(wire.StatusRequest, translated(self.status, self._tasks.log)),
        }

    async def checkpoint(self, request: wire.CheckpointRequest) -> Message:
        """Write an image to a directory of the client's choice, relative names below the checkpoint root."""
        container = self._tasks.container(request.id)
        if not request.path:
            raise RpcError(Code.INVALID_ARGUMENT, "path: the directory for the image is missing: invalid argument")
        from kybernate_shim.task.checkpointing import from_shim_service, response, work_directory  # on use

        id = operation_id(request.operation)
        work = work_directory(container.config, self._tasks.namespace, request.id, "checkpoint")
        try:
            wanted = from_shim_service(request, spec=container.spec, config=container.config, work=work)
        except ValueError as error:
            raise RpcError(Code.INVALID_ARGUMENT, f"{error}: invalid argument") from error

        async def dump() -> Message:
            dumped, operation = await container.checkpoint(wanted, id)
            reply = response(dumped, wanted, operation.seconds, operation.frozen_ms)
            reply.held_seconds = container.held_seconds
            return reply

        return await container.operations().requests.once(id, "checkpoint", request, dump)

    async def release(self, request: wire.ReleaseRequest) -> Message:
        """Resume a container that a checkpoint holds."""
        container = self._tasks.container(request.id)
        await container.release()
        return wire.ReleaseResponse(container=_status(container))

    async def suspend(self, request: wire.SuspendRequest) -> Message:
        """Move the container's VRAM into host memory."""
        from kybernate_shim.task.gpu_report import arena_message  # most are never suspended
        from kybernate_shim.task.operation_messages import steps_of

        container, id = self._tasks.container(request.id), operation_id(request.operation)

        async def work() -> Message:
            left, operation = await container.suspend(lock_seconds=request.timeout_ms / 1000, operation=id)
            arena = arena_message(left.arena_use)
            return wire.SuspendResponse(steps=steps_of(operation.steps), vram_bytes=left.vram_bytes, arena=arena)

        return await container.operations().requests.once(id, "suspend", request, work)

    async def park(self, request: wire.ParkRequest) -> Message:
        """Move the VRAM of a suspended container to the disk."""
        from kybernate_shim.task.operation_messages import steps_of  # on use

        container, id = self._tasks.container(request.id), operation_id(request.operation)

        async def work() -> Message:
            left, operation = await container.park(operation=id)
            return wire.ParkResponse(steps=steps_of(operation.steps), parked_bytes=left.parked_bytes)

        return await container.operations().requests.once(id, "park", request, work)

    async def resume(self, request: wire.ResumeRequest) -> Message:
        """Move it back."""
        from kybernate_shim.task.operation_messages import steps_of  # on use

        container, id = self._tasks.container(request.id), operation_id(request.operation)

        async def work() -> Message:
            left, operation = await container.unsuspend(
                restore_seconds=request.timeout_ms / 1000, room_seconds=request.room_timeout_ms / 1000, operation=id
            )
            return wire.ResumeResponse(steps=steps_of(operation.steps), vram_bytes=left.vram_bytes)

        return await container.operations().requests.once(id, "resume", request, work)

    async def cancel(self, request: wire.CancelRequest) -> Message:
        """Undo the operation that runs, and answer when it has ended."""
        from kybernate_shim.task.operation_messages import ended  # on use

        container, id = self._tasks.container(request.id), operation_id(request.operation)
        caller = CALLER.get()
        by = f"uid {caller.uid} (pid {caller.pid})" if caller is not None else "the daemon"
        outcome = await container.operations().cancel(id, by)
        return wire.CancelResponse(ended=ended(outcome), container=_status(container))

    async def status(self, request: wire.StatusRequest) -> Message:
        """Say what each container is doing; takes no lock, so it is answered in the middle of a checkpoint.

        Nothing is read from processes for that, unless the driver's report on them is requested.
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


def _status(container: Container) -> wire.Container:
    reply = wire.Container(
        id=container.id,
        state=container.init.state,
        pid=container.init.pid,
        suspended=container.suspended,
        gpu=container.gpu.state,
        vram_bytes=container.vram_bytes,
        parked_bytes=container.parked_bytes,
        held_seconds=container.held_seconds,
        restored_from=str(container.image.path) if container.image is not None else "",
    )
    if container.suspended and (use := container.arena_use) is not None:
        from kybernate_shim.task.gpu_report import arena_message  # as above

        reply.arena.CopyFrom(arena_message(use))
    operation = container.operation
    if operation is not None:
        reply.phase, reply.step = operation.verb, operation.step_name
        reply.done_bytes, reply.total_bytes = operation.done, operation.total_bytes
        reply.seconds = operation.seconds
        reply.cancelling = bool(operation.cancelled_by)
    reply.operation = container.operation_id
    if (ledger := container.ledger) is not None and ledger.outcomes:
        from kybernate_shim.task.operation_messages import add_ended  # as above

        add_ended(reply, ledger)
    return reply
