"""Restore: the agent makes record, snapshot and task by containerd's API, and the shim brings the processes back.

Record and snapshot carry the operation's id as a label, so that after a crash the agent knows them for its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from kybernate.agent.operations.attempt import Attempt
from kybernate.agent.operations.errors import OperationUndone, OutcomeUnknown
from kybernate.agent.operations.evidence import steps_of
from kybernate.agent.operations.model import Observation, Operation, Restore, Result, Seen, Step
from kybernate.agent.operations.resolve import Node, wish_of
from kybernate.agent.storage.arrivals import Arrivals
from kybernate.node import rootfs
from kybernate.node.containerd import Containerd, ContainerdUnreachable
from kybernate.node.failure import Failure
from kybernate.node.lookup import KnownContainer
from kybernate.node.places import open_image
from kybernate.node.restore import NotRestored, prepared, remove
from kybernate.node.restore_plan import plan_of, trusted_spec
from kybernate.node.shim import WATCH_SECONDS, restore_of, shim_of
from kybernate.node.stdio import into_log
from kybernate.store.streaming import memory
from kybernate.store.tiers.tier import Ref
from kybernate.store.transfer import Progress
from kybernate_shim.checkpoint.image.requested import OPERATION
from kybernate_shim.checkpoint.image.store import Image, read_for_restore
from kybernate_shim.messages import shim_pb2 as wire

RESTORING = "restore"  # the shim's phase
RECEIVE = "receive"  # the step in which that part of an image arrives that a restore begins with


@dataclass(frozen=True)
class _Here:
    """An image that can be opened, and what it has cost until then."""

    open: Callable[[], Image]
    steps: tuple[Step, ...] = ()


class _Receiving:
    """The step in which the part of an image arrives that its restore begins with; the shim reports what follows."""

    def __init__(self, attempt: Attempt) -> None:
        attempt.step(RECEIVE)
        self._attempt, self._count = attempt, attempt.counted(RECEIVE)
        self._began, self._bytes, self._ended = time.monotonic(), 0, False

    def report(self, progress: Progress) -> None:
        """Take over the progress of the transfer. Raises OperationUndone where the operation is to end."""
        self._attempt.check()
        if not self._ended:
            self._bytes = progress.done_bytes
            self._count(progress.done_bytes, progress.total_bytes)

    def end(self) -> Step:
        self._ended = True
        return Step(RECEIVE, time.monotonic() - self._began, self._bytes)


class Restores:
    """Carries out restores."""

    def __init__(self, node: Node, arrivals: Arrivals | None = None) -> None:
        self._node = node
        self._arrivals = arrivals

    async def execute(self, attempt: Attempt) -> Result:
        """Make the container, or wait for the shim that restores it already; see Executor.execute."""
        operation = attempt.operation
        watcher = asyncio.create_task(self._watch(attempt))
        try:
            if await asyncio.to_thread(self._record, operation) is not None:
                return await self._wait(operation)
            async with self._image(attempt) as image:
                pid = await attempt.in_thread(lambda: self._make(attempt, image.open))
            result = await self._result(operation, pid)
            return replace(result, steps=(*image.steps, *result.steps)) if result.steps else result
        except ContainerdUnreachable as error:
            raise OutcomeUnknown(str(error)) from error
        except NotRestored as error:
            if attempt.stop.is_set() and not getattr(error, "__notes__", ()):
                raise OperationUndone(f"the restore was undone: {error.state}") from error
            raise
        finally:
            watcher.cancel()
            await asyncio.wait({watcher})

    async def cancel(self, operation: Operation) -> None:
        """Ask the shim to give up what it restores; where it has not begun, the attempt ends by itself."""
        found = await asyncio.to_thread(self._record, operation)
        if found is None:
            return
        try:
            async with shim_of(found, self._node.address) as shim:
                await shim.cancel(found.id)
        except Failure:
            return  # nothing runs there: it has not begun yet, or has ended

    async def observe(self, operation: Operation) -> Observation:
        """Return what became of it, by the labels of what it has made."""
        found = await asyncio.to_thread(self._record, operation)
        if found is None:
            left = await asyncio.to_thread(self._has_snapshot, operation)
            return Observation(Seen.HALF_DONE, "its snapshot is there") if left else Observation(Seen.ABSENT, "")
        status = await self._status(found)
        if status is not None and status.phase == RESTORING:
            return Observation(Seen.AT_WORK, "its shim brings the processes back")
        if found.live and found.state != "created":
            return Observation(Seen.SUCCEEDED, "its container runs", result=await self._result(operation, found.pid))
        return Observation(Seen.HALF_DONE, f"its container is there, {found.state or 'without a task'}")

    async def roll_back(self, operation: Operation) -> str:
        """Remove what it has made, and nothing that is not its own."""
        done = await asyncio.to_thread(self._remove, operation)
        if operation.target.ref:
            await asyncio.to_thread(memory.remove_left)
        return done

    @asynccontextmanager
    async def _image(self, attempt: Attempt) -> AsyncIterator[_Here]:
        """Yield the image once its restore may begin; the rest of one that is elsewhere arrives meanwhile."""
        target, wanted = attempt.operation.target, attempt.operation.arguments
        assert isinstance(wanted, Restore)
        if not target.ref:
            yield _Here(lambda: open_image(target.image))
            return
        assert self._arrivals is not None, "only an agent with tiers resolves it"
        receiving = _Receiving(attempt)
        ref, id = Ref(*target.ref), attempt.operation.id
        arrival = self._arrivals.in_memory(ref, id, receiving.report, stored=wanted.from_store)
        directory = await attempt.until_stopped(arrival.__aenter__())
        async with AsyncExitStack() as leaving:
            leaving.push_async_exit(arrival)
            yield _Here(lambda: read_for_restore(directory), (receiving.end(),))

    def _make(self, attempt: Attempt, opened: Callable[[], Image]) -> int:
        operation = attempt.operation
        wanted = operation.arguments
        assert isinstance(wanted, Restore)
        attempt.step("look")
        image = opened()
        saved = trusted_spec(image)
        terminal = bool((saved.get("process") or {}).get("terminal"))
        stdio = into_log(Path(wanted.log_path) if wanted.log_path else None, terminal=terminal)
        with Containerd(self._node.address) as containerd:
            plan = plan_of(containerd, image, saved, wish_of(wanted, operation.target.container, operation.id))
            attempt.step("prepare")
            with prepared(containerd, plan, stdio) as created:
                asyncio.run(self._require_ours(created.container))
                attempt.step("start")
                return created.start()

    async def _require_ours(self, container: KnownContainer) -> None:
        """Another shim than ours would start the container from nothing."""
        async with shim_of(container, self._node.address) as shim:
            await shim.status(container.id)

    async def _result(self, operation: Operation, pid: int) -> Result:
        """Return the numbers of a restore as the shim has them."""
        target = operation.target
        result = Result(image_id=target.ref[-1], pid=pid) if target.ref else Result(path=target.image, pid=pid)
        try:
            found = await asyncio.to_thread(self._record, operation)
        except Failure:
            return result
        if found is None:
            return result
        ended = await restore_of(found, self._node.address)
        return replace(result, source=ended.source, steps=steps_of(ended.steps))

    async def _wait(self, operation: Operation) -> Result:
        """Wait for a restore that has been running since before a restart of the agent."""
        seen = await self.observe(operation)
        while seen.seen == Seen.AT_WORK:
            await asyncio.sleep(WATCH_SECONDS)  # a shim has no call that waits for a restore
            seen = await self.observe(operation)
        if seen.seen == Seen.SUCCEEDED and seen.result is not None:
            return seen.result
        raise OutcomeUnknown(seen.note)

    async def _watch(self, attempt: Attempt) -> None:
        """Report the shim's steps as soon as there is a shim."""
        container: KnownContainer | None = None
        while True:
            try:
                container = container or await asyncio.to_thread(self._record, attempt.operation)
                if container is not None and (status := await self._status(container)) is not None:
                    attempt.status(status)
            except Failure:
                pass  # what is watched will say what is wrong
            await asyncio.sleep(WATCH_SECONDS)

    async def _status(self, container: KnownContainer) -> wire.Container | None:
        try:
            async with shim_of(container, self._node.address) as shim:
                found = await shim.status(container.id)
        except Failure:
            return None
        return found[0] if found else None

    def _record(self, operation: Operation) -> KnownContainer | None:
        """Return the container that this operation has made, None where it has not."""
        target = operation.target
        with Containerd(self._node.address) as containerd:
            found = containerd.container(target.namespace, target.container)
        return found[0] if found is not None and found[1].get(OPERATION) == operation.id else None

    def _has_snapshot(self, operation: Operation) -> bool:
        with Containerd(self._node.address) as containerd:
            labels = rootfs.labels_of(_snapshots(containerd, operation), operation.target.container)
        return labels is not None and labels.get(OPERATION) == operation.id

    def _remove(self, operation: Operation) -> str:
        found = self._record(operation)
        with Containerd(self._node.address) as containerd:
            if found is not None:
                remove(containerd, found)
            elif self._has_snapshot(operation):
                rootfs.remove(_snapshots(containerd, operation), operation.target.container)
        return f"container {operation.target.container}, which was half made, was removed"


def _snapshots(containerd: Containerd, operation: Operation) -> rootfs.SnapshotPlace:
    wanted = operation.arguments
    assert isinstance(wanted, Restore)
    return rootfs.SnapshotPlace(containerd, operation.target.namespace, wish_of(wanted, "").snapshotter)
