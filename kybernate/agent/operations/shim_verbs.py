"""Checkpoint, suspend, resume and swap: carried out by shims, which know each operation by its id.

A request that is repeated with the same id joins what runs, or has the answer of what has ended. So waiting again after
a restart of the agent is the same call as beginning.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

from kybernate.agent.operations.attempt import Attempt
from kybernate.agent.operations.errors import NodeRebooted, OperationUndone, OutcomeUnknown, fault_of
from kybernate.agent.operations.evidence import Evidence, Whole, judge, steps_of
from kybernate.agent.operations.model import (
    Checkpoint,
    Observation,
    Operation,
    Result,
    Resume,
    Seen,
    Suspend,
    Swap,
)
from kybernate.agent.operations.resolve import Node
from kybernate.agent.probes import ProbeLimit, limit_by_probes
from kybernate.node.containerd import Containerd, ContainerdUnreachable
from kybernate.node.failure import Failure
from kybernate.node.lookup import ContainerNotFound, KnownContainer
from kybernate.node.restore import image_digest
from kybernate.node.shim import (
    NoTask,
    NothingToCancel,
    Shim,
    ShimGone,
    ShimRefused,
    ShimTooSlow,
    shim_of,
    state_now,
    watching,
)
from kybernate.node.swap import NotSwapped, SwapNames, swap
from kybernate_shim.checkpoint.image.store import CheckpointInvalid, CheckpointNotFound, read_image
from kybernate_shim.messages import shim_pb2 as wire

SWAP_WAIT_SECONDS = 10.0
ASK_AGAIN_SECONDS = 0.2


class ShimVerbs:
    """Carries out what a shim does."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def execute(self, attempt: Attempt) -> Result:
        """Carry the operation out, or join what the shim does already; see Executor.execute."""
        operation = attempt.operation
        if isinstance(operation.arguments, Swap):
            return await self._swap(attempt, operation.arguments)
        try:
            container = await self._container(operation.target.container, operation)
            attempt.check()
            async with shim_of(container, self._node.address) as shim, watching(shim, container.id, attempt.status):
                return await self._call(shim, container, operation)
        except (ShimGone, ShimTooSlow, ContainerdUnreachable) as error:
            raise OutcomeUnknown(str(error)) from error
        except ShimRefused as error:
            if error.code == "CANCELED":
                raise OperationUndone(str(error)) from error
            error.args = (f"cannot {operation.verb} {container.title}: {error}",)
            error.state = await state_now(container, self._node.address)
            raise

    async def cancel(self, operation: Operation, ended: asyncio.Event) -> None:
        """Ask the shims to undo it, until they know of it or the attempt has `ended`."""
        await asyncio.gather(*(self._cancel(operation, id, name, ended) for id, name in _parts(operation).items()))

    async def observe(self, operation: Operation) -> Observation:
        """Return what became of it. Raises Failure where that cannot be seen now."""
        rebooted = operation.boot != self._node.boot
        found = {id: await self._look(operation, id) for id in _parts(operation)}
        if isinstance(operation.arguments, Swap):
            return _of_swap(operation, found, rebooted=rebooted)
        status, problem = found[operation.target.container]
        image = await asyncio.to_thread(_whole, operation) if isinstance(operation.arguments, Checkpoint) else None
        return judge(operation, Evidence(rebooted, status, problem, image))

    async def _call(self, shim: Shim, container: KnownContainer, operation: Operation) -> Result:
        match operation.arguments:
            case Checkpoint() as wanted:
                request = await asyncio.to_thread(self._checkpoint_request, container, operation, wanted)
                return await asyncio.to_thread(_of_checkpoint, operation, await shim.checkpoint(request))
            case Suspend() as wanted:
                milliseconds = round(wanted.lock_timeout * 1000)
                suspend = wire.SuspendRequest(id=container.id, timeout_ms=milliseconds, operation=operation.id)
                return _of_suspend(await shim.suspend(suspend))
            case Resume() as wanted:
                resume = wire.ResumeRequest(
                    id=container.id,
                    timeout_ms=round(wanted.restore_timeout * 1000),
                    room_timeout_ms=round(wanted.room_timeout * 1000),
                    operation=operation.id,
                )
                resumed = await shim.resume(resume)
                return Result(vram_bytes=resumed.vram_bytes, steps=steps_of(resumed.steps))
            case _:
                raise AssertionError(operation.verb)

    def _checkpoint_request(
        self, container: KnownContainer, operation: Operation, wanted: Checkpoint
    ) -> wire.CheckpointRequest:
        with Containerd(self._node.address) as containerd:
            digest = image_digest(containerd, container.namespace, container.image)
        limit = ProbeLimit(wanted.max_freeze)
        if not wanted.max_freeze and container.pod:
            pod = self._node.pod_of(container.pod_namespace, container.pod)
            limit = limit_by_probes(pod, container.name, time.time())
        return wire.CheckpointRequest(
            id=container.id,
            path=operation.target.image,
            exit=wanted.exit,
            hold=wanted.hold,
            hold_seconds=wanted.hold_timeout,
            tcp=wanted.tcp,
            rootfs_diff=not wanted.without_rootfs,
            volumes=wanted.volumes,
            force=wanted.force,
            image=container.image,
            image_digest=digest,
            operation=operation.id,
            max_freeze_seconds=limit.seconds,
            max_freeze_from=limit.source,
        )

    async def _swap(self, attempt: Attempt, wanted: Swap) -> Result:
        operation = attempt.operation
        try:
            leaving = await self._container(operation.target.container, operation)
            coming = await self._container(operation.target.other, operation)
            attempt.check()
            wait = wanted.room_timeout or SWAP_WAIT_SECONDS
            done = await swap(leaving, coming, self._node.address, wait, operation=operation.id)
        except ContainerdUnreachable as error:
            raise OutcomeUnknown(str(error)) from error
        except NotSwapped as error:
            if attempt.stop.is_set() and error.undone:
                raise OperationUndone(f"{error}; {error.state}") from error
            raise
        left = _of_suspend(done.left)
        steps = (*left.steps, *steps_of(done.came.steps))
        return Result(
            vram_bytes=done.came.vram_bytes, arena_bytes=left.arena_bytes, arena_reasons=left.arena_reasons, steps=steps
        )

    async def _container(self, id: str, operation: Operation) -> KnownContainer:
        def find() -> KnownContainer:
            with Containerd(self._node.address) as containerd:
                found = containerd.container(operation.target.namespace, id)
            if found is None:
                raise ContainerNotFound(f"container {id} is gone")
            return found[0]

        return await asyncio.to_thread(find)

    async def _cancel(self, operation: Operation, id: str, name: str, ended: asyncio.Event) -> None:
        while not ended.is_set():
            try:
                container = await self._container(id, operation)
                async with shim_of(container, self._node.address) as shim:
                    await shim.cancel(id, name)
                return
            except NothingToCancel as error:
                if error.code == "FAILED_PRECONDITION":
                    return  # it has ended otherwise
            except (NoTask, ContainerNotFound):
                return  # it has ended with its container
            try:  # the request is not with the shim yet
                async with asyncio.timeout(ASK_AGAIN_SECONDS):
                    await ended.wait()
            except TimeoutError:
                pass

    async def _look(self, operation: Operation, id: str) -> tuple[wire.Container | None, str]:
        """Return what the container's shim says, or why there is none. Raises ContainerdUnreachable, ShimTooSlow."""
        try:
            container = await self._container(id, operation)
            async with shim_of(container, self._node.address) as shim:
                found = await shim.status(id)
        except (ContainerdUnreachable, ShimTooSlow):
            raise
        except Failure as error:
            return None, str(error)
        return (found[0], "") if found else (None, "its shim does not know it")


def _parts(operation: Operation) -> Mapping[str, str]:
    """Return by container the name under which its shim knows the operation."""
    target = operation.target
    if not isinstance(operation.arguments, Swap):
        return {target.container: operation.id}
    names = SwapNames.of(operation.id)
    return {target.container: names.leaving, target.other: names.coming}


def _of_swap(
    operation: Operation, found: Mapping[str, tuple[wire.Container | None, str]], *, rebooted: bool
) -> Observation:
    """Where both shims answer, repeating the swap joins each part that runs and skips each that has ended."""
    target = operation.target
    gone = [id for id, (status, _) in found.items() if status is None]
    if not gone:
        known = any(_knows(status, operation.id) for status, _ in found.values() if status is not None)
        return Observation(Seen.AT_WORK if known else Seen.ABSENT, "both shims answer")
    words = "; ".join(f"{id}: {_state(status, problem)}" for id, (status, problem) in found.items())
    error = (
        NodeRebooted("the node was restarted during the swap", state=words)
        if rebooted
        else NotSwapped(f"a container of the swap of {target.title} and {target.other_title} has ended", state=words)
    )
    return Observation(Seen.FAILED, words, fault=fault_of(error))


def _knows(status: wire.Container, id: str) -> bool:
    names = {status.operation, status.last.operation, *(ended.operation for ended in status.earlier)}
    return any(name.startswith(f"{id}.") for name in names)


def _state(status: wire.Container | None, problem: str) -> str:
    if status is None:
        return problem
    return f"{status.state}{', its VRAM in host memory' if status.suspended else ''}"


def _of_suspend(reply: wire.SuspendResponse) -> Result:
    return Result(
        vram_bytes=reply.vram_bytes,
        arena_bytes=reply.arena.bytes,
        arena_reasons=tuple(reply.arena.reasons),
        steps=steps_of(reply.steps),
    )


def _of_checkpoint(operation: Operation, reply: wire.CheckpointResponse) -> Result:
    whole = _whole(operation)
    return Result(
        path=reply.path,
        image_id=whole.manifest.id if whole else "",
        manifest_digest=reply.manifest_digest,
        bytes=reply.bytes,
        frozen_ms=reply.frozen_ms,
        vram_bytes=sum(process.bytes for process in whole.manifest.cuda_processes) if whole else 0,
        steps=steps_of(reply.steps),
    )


def _whole(operation: Operation) -> Whole | None:
    """Return the image at the checkpoint's place, if it is whole and of the container."""
    try:
        image = read_image(Path(operation.target.image))
    except (CheckpointNotFound, CheckpointInvalid, OSError):
        return None
    if image.manifest.source.container != operation.target.container:
        return None
    return Whole(image.manifest, image.digest)
