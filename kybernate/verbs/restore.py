"""Restore: record, snapshot and task are made by containerd's API, and the shim brings the processes back.

Record and snapshot carry the operation's id as a label, so that after a crash they are known as the operation's own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kybernate.messages import agent_pb2 as wire
from kybernate.node import rootfs
from kybernate.node.containerd import Containerd, ContainerdUnreachable
from kybernate.node.failure import Failure, NoImage, Refused
from kybernate.node.lookup import ID_LENGTH, KnownContainer
from kybernate.node.places import open_image
from kybernate.node.restore import ID_TAKEN_ADVICE, NotRestored, prepared, remove
from kybernate.node.restore_plan import RUNTIME, SNAPSHOTTER, RestoreWish, namespace_for, plan_of, trusted_spec
from kybernate.node.shim import WATCH_SECONDS, restore_of, shim_of
from kybernate.node.stdio import into_log
from kybernate.store.policy.model import Priority
from kybernate.store.streaming import memory
from kybernate.store.tiers.tier import Ref
from kybernate.verbs.errors import OperationUndone, OutcomeUnknown
from kybernate.verbs.model import GPU, Observation, Operation, Result, Seen, Step, Target, steps_of
from kybernate.verbs.node import Elsewhere, Node
from kybernate.verbs.places import absolute, disk_of, held, image_here
from kybernate.verbs.room import Taker
from kybernate.verbs.verb import Verb
from kybernate_shim.checkpoint.image.manifest import Source
from kybernate_shim.checkpoint.image.requested import OPERATION
from kybernate_shim.checkpoint.image.store import Image, read_for_restore
from kybernate_shim.messages import shim_pb2 as shim_wire

if TYPE_CHECKING:  # libraries of the extra `store`
    from kybernate.store.transfer import TransferProgress
    from kybernate.verbs.attempt import Attempt

NAME_LENGTH = 50  # of the source's name in that of a restored container: containerd allows 76 characters in all
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

    def report(self, progress: TransferProgress) -> None:
        """Take over the progress of the transfer. Raises OperationUndone where the operation is to end."""
        self._attempt.check()
        if not self._ended:
            self._bytes = progress.done_bytes
            self._count(progress.done_bytes, progress.total_bytes)

    def end(self) -> Step:
        self._ended = True
        return Step(RECEIVE, time.monotonic() - self._began, self._bytes)


@dataclass(frozen=True)
class Restore(Verb):
    """`name` is the id of the new container, empty for one that is made up.

    `container_image` and the rest replace what the source had; `log_path` is a file for the output. An image that is
    not on the node arrives while it is restored; `from_store`: also one that is there, from the object store.
    """

    verb = "restore"
    call = "Operations/Restore"
    request = wire.RestoreRequest

    image: str
    name: str = ""
    namespace: str = ""
    container_image: str = ""
    runtime: str = ""
    snapshotter: str = ""
    log_path: str = ""
    force: bool = False
    from_store: bool = False

    def resolve(self, node: Node, id: str) -> Target:
        if self.log_path:
            absolute(self.log_path)
        try:
            path = self._image_here(node)
        except NoImage:
            if (found := self._elsewhere(node)) is None:
                raise
            return self._from_elsewhere(node, id, found)
        image = open_image(str(path), near=True, arriving=True)
        target = self._new_container(node, id, image.manifest.source)
        with Containerd(node.address) as containerd:
            plan_of(containerd, image, trusted_spec(image), self._wish(target.container))
        return replace(
            target,
            image=str(image.path),
            shares=(held(image.path),),
            copies=(disk_of(image.path), *(f"{GPU}{gpu.uuid}" for gpu in image.manifest.gpus)),
        )

    async def execute(self, attempt: Attempt) -> Result:
        """Make the container, or wait for the shim that restores it already. Transfers between tiers pause."""
        operation, node = attempt.operation, attempt.node
        turn = node.movement.turns.transfer(Priority.RESTORE) if node.movement is not None else nullcontext()
        watcher = asyncio.create_task(_watch(attempt))
        try:
            if await asyncio.to_thread(_record, node, operation) is not None:
                return await self._wait(node, operation)
            with turn:
                async with self._image(attempt) as image, attempt.room(_taker(operation)):
                    pid = await attempt.in_thread(lambda: self._make(attempt, image.open))
            result = await _result(node, operation, pid)
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

    async def cancel(self, node: Node, operation: Operation, ended: asyncio.Event) -> None:
        """Ask the shim to give up what it restores; where it has not begun, the attempt ends by itself."""
        found = await asyncio.to_thread(_record, node, operation)
        if found is None:
            return
        try:
            async with shim_of(found, node.address) as shim:
                await shim.cancel(found.id)
        except Failure:
            return  # nothing runs there: it has not begun yet, or has ended

    async def observe(self, node: Node, operation: Operation) -> Observation:
        """Return what became of it, by the labels of what it has made."""
        found = await asyncio.to_thread(_record, node, operation)
        if found is None:
            left = await asyncio.to_thread(self._has_snapshot, node, operation)
            return Observation(Seen.HALF_DONE, "its snapshot is there") if left else Observation(Seen.ABSENT, "")
        status = await _status(node, found)
        if status is not None and status.phase == RESTORING:
            return Observation(Seen.AT_WORK, "its shim brings the processes back")
        if found.live and found.state != wire.Container.CREATED:
            result = await _result(node, operation, found.pid)
            return Observation(Seen.SUCCEEDED, "its container runs", result=result)
        return Observation(Seen.HALF_DONE, f"its container is there, {found.state_word or 'without a task'}")

    async def roll_back(self, node: Node, operation: Operation) -> str:
        """Remove what it has made, and nothing that is not its own."""
        done = await asyncio.to_thread(self._remove, node, operation)
        if operation.target.ref:
            await asyncio.to_thread(memory.remove_left)
        return done

    def _wish(self, id: str, operation: str = "") -> RestoreWish:
        """Return what is wanted of the new container `id`, which the operation of that name makes."""
        return RestoreWish(
            id=id,
            namespace=self.namespace,
            image=self.container_image,
            runtime=self.runtime or RUNTIME,
            snapshotter=self.snapshotter or SNAPSHOTTER,
            force=self.force,
            operation=operation,
        )

    def _image_here(self, node: Node) -> Path:
        """Return the directory of the image on this node, where that is wanted. Raises NoImage."""
        if self.from_store:
            raise NoImage(
                f"the object store has no image {self.image}",
                state="no operation was started",
                advice="`kybernate store ls` lists what it has; `store.url` in agent.toml names the store",
            )
        return image_here(node, self.image, arriving=True)

    def _elsewhere(self, node: Node) -> Elsewhere | None:
        """Return an image that is not on this node; a path is none."""
        return None if self.image.startswith("/") else node.elsewhere(self.image, self.from_store)

    def _from_elsewhere(self, node: Node, id: str, found: Elsewhere) -> Target:
        """Return the target of a restore whose image arrives meanwhile: what it asks for is known once that begins."""
        target = self._new_container(node, id, found.source)
        ref = (found.ref.namespace, found.ref.name, found.ref.id)
        copies = tuple(f"{GPU}{uuid}" for uuid in found.gpus)
        return replace(target, image=found.ref.id, ref=ref, shares=(f"image {found.ref.id}",), copies=copies)

    def _new_container(self, node: Node, id: str, source: Source) -> Target:
        """Return the target with the new container. Raises Refused.

        A container without a name is called after its source and the operation, without an operation as its source.
        """
        name = self.name or (f"{_source_name(source)}-{id}" if id else source.container)
        namespace = namespace_for(source, self._wish(name))
        with Containerd(node.address) as containerd:
            if containerd.container(namespace, name) is not None:
                raise Refused(f"container {name} exists in containerd's namespace {namespace}", advice=ID_TAKEN_ADVICE)
        return Target(namespace=namespace, container=name, title=name, holds=(f"container {namespace}/{name}",))

    @asynccontextmanager
    async def _image(self, attempt: Attempt) -> AsyncIterator[_Here]:
        """Yield the image once its restore may begin; the rest of one that is elsewhere arrives meanwhile."""
        target, arrivals = attempt.operation.target, attempt.node.arrivals
        if not target.ref:
            yield _Here(lambda: open_image(target.image, arriving=True))
            return
        assert arrivals is not None, "only an agent with tiers resolves it"
        receiving = _Receiving(attempt)
        ref, id = Ref(*target.ref), attempt.operation.id
        arrival = arrivals.in_memory(ref, id, receiving.report, stored=self.from_store)
        directory = await attempt.until_stopped(arrival.__aenter__())
        async with AsyncExitStack() as leaving:
            leaving.push_async_exit(arrival)
            yield _Here(lambda: read_for_restore(directory), (receiving.end(),))

    def _make(self, attempt: Attempt, opened: Callable[[], Image]) -> int:
        operation, node = attempt.operation, attempt.node
        attempt.step("look")
        image = opened()
        saved = trusted_spec(image)
        terminal = bool((saved.get("process") or {}).get("terminal"))
        log = Path(self.log_path) if self.log_path else None
        stdio = attempt.streams(terminal) if attempt.streams else into_log(log, terminal=terminal)
        with Containerd(node.address) as containerd:
            plan = plan_of(containerd, image, saved, self._wish(operation.target.container, operation.id))
            attempt.step("prepare")
            with prepared(containerd, plan, stdio) as created:
                asyncio.run(_require_ours(node, created.container))
                attempt.step("start")
                pid = created.start()
                if not operation.id:  # an agent finds its own after a restart; a command that ends leaves none behind
                    attempt.check()
                return pid

    async def _wait(self, node: Node, operation: Operation) -> Result:
        """Wait for a restore that has been running since before a restart of the agent."""
        seen = await self.observe(node, operation)
        while seen.seen == Seen.AT_WORK:
            await asyncio.sleep(WATCH_SECONDS)  # a shim has no call that waits for a restore
            seen = await self.observe(node, operation)
        if seen.seen == Seen.SUCCEEDED and seen.result is not None:
            return seen.result
        raise OutcomeUnknown(seen.note)

    def _has_snapshot(self, node: Node, operation: Operation) -> bool:
        with Containerd(node.address) as containerd:
            labels = rootfs.labels_of(self._snapshots(containerd, operation), operation.target.container)
        return labels is not None and labels.get(OPERATION) == operation.id

    def _remove(self, node: Node, operation: Operation) -> str:
        found = _record(node, operation)
        with Containerd(node.address) as containerd:
            if found is not None:
                remove(containerd, found)
            elif self._has_snapshot(node, operation):
                rootfs.remove(self._snapshots(containerd, operation), operation.target.container)
        return f"container {operation.target.container}, which was half made, was removed"

    def _snapshots(self, containerd: Containerd, operation: Operation) -> rootfs.SnapshotPlace:
        return rootfs.SnapshotPlace(containerd, operation.target.namespace, self.snapshotter or SNAPSHOTTER)


def of_parked(node: Node, name: str) -> Restore | None:
    """Return the restore of the parked container that a name means; None where it is not parked. Blocks."""
    parked = node.freed(name)
    if parked is None:
        return None
    return Restore(parked.image, name=parked.id, namespace=parked.namespace, log_path=parked.log)


def _taker(operation: Operation) -> Taker:
    target = operation.target
    gpus = tuple(name.removeprefix(GPU) for name in target.copies if name.startswith(GPU))
    return Taker(target.namespace, target.container, gpus, operation=operation.id, exists=False)


def _source_name(source: Source) -> str:
    return source.name[:NAME_LENGTH].rstrip("._-") or source.container[:ID_LENGTH].rstrip("._-")


async def _require_ours(node: Node, container: KnownContainer) -> None:
    """Another shim than ours would start the container from nothing."""
    async with shim_of(container, node.address) as shim:
        await shim.status(container.id)


async def _result(node: Node, operation: Operation, pid: int) -> Result:
    """Return the numbers of a restore as the shim has them."""
    target = operation.target
    result = Result(image_id=target.ref[-1], pid=pid) if target.ref else Result(path=target.image, pid=pid)
    try:
        found = await asyncio.to_thread(_record, node, operation)
    except Failure:
        return result
    if found is None:
        return result
    ended = await restore_of(found, node.address)
    return replace(result, source=ended.source, seconds=ended.seconds, steps=steps_of(ended.steps))


async def _watch(attempt: Attempt) -> None:
    """Report the shim's steps as soon as there is a shim."""
    container: KnownContainer | None = None
    while True:
        try:
            container = container or await asyncio.to_thread(_record, attempt.node, attempt.operation)
            if container is not None and (status := await _status(attempt.node, container)) is not None:
                attempt.status(status)
        except Failure:
            pass  # what is watched will say what is wrong
        await asyncio.sleep(WATCH_SECONDS)


async def _status(node: Node, container: KnownContainer) -> shim_wire.Container | None:
    try:
        async with shim_of(container, node.address) as shim:
            found = await shim.status(container.id)
    except Failure:
        return None
    return found[0] if found else None


def _record(node: Node, operation: Operation) -> KnownContainer | None:
    """Return the container that this operation has made, None where it has not."""
    target = operation.target
    with Containerd(node.address) as containerd:
        found = containerd.container(target.namespace, target.container)
    return found[0] if found is not None and found[1].get(OPERATION, "") == operation.id else None
