"""The service on the restricted socket: a container's own processes, about their own container and nothing else.

No field of a request names a container, a path or a namespace. Where an image goes, and how much room there is, is
decided here.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

from kybernate.agent.access.caller import CALLER, Caller, OwnContainer
from kybernate.agent.inventory.gpus import Activity
from kybernate.agent.operations.engine import Engine
from kybernate.agent.operations.messages import operation_message, require_bounded, submission
from kybernate.agent.operations.store import MOST_LIST, Wanted
from kybernate.agent.service.idle import Idleness
from kybernate.agent.service.quota import Quota
from kybernate.messages import agent_pb2 as wire
from kybernate.messages.agent_pb2_grpc import SelfServicer
from kybernate.node.failure import Denied, Exhausted, Failure, Invalid
from kybernate.verbs.checkpoint import Checkpoint
from kybernate.verbs.model import FINAL, Arguments, Operation, State
from kybernate.verbs.suspend import Suspend

RESERVED: Final = "kybernate.io/"  # begins the names of labels that mean something to the agent
PREFIX: Final = "self-"  # begins the names of images that containers have asked for
ACTIVE: Final = tuple(state for state in State if state not in FINAL)
# Nothing of the node.
SHOWN: Final = ("namespace", "id", "title", "pod_namespace", "pod", "name", "image", "state", "gpu", "operation",
                "vram_bytes", "arena_bytes", "workload", "gpu_uuids", "started", "restored_from")  # fmt: skip
PLAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # names of Kubernetes: RFC 1123
IDLE_SECONDS: Final = 60.0
MOST_IDLE_SECONDS: Final = 86400.0


class Own(SelfServicer):
    """`find` returns the container as the inventory has it, None if it has ended. `root` is where images lie.

    `activity` returns what the container does on GPUs.
    """

    def __init__(
        self,
        engine: Engine,
        find: Callable[[OwnContainer], wire.Container | None],
        root: Callable[[], Path],
        quota: Quota,
        idleness: Idleness,
        activity: Callable[[OwnContainer], Awaitable[Activity]],
    ) -> None:
        self._engine, self._find, self._root, self._quota, self._idleness = engine, find, root, quota, idleness
        self._activity = activity
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def GetSelf(self, request: wire.GetSelfRequest, context: Any) -> wire.Container:
        _, own = self._caller()
        found = self._find(own)
        return wire.Container(**{name: getattr(found, name) for name in SHOWN}) if found else wire.Container(id=own.id)

    async def Checkpoint(self, request: wire.SelfCheckpointRequest, context: Any) -> wire.Operation:
        caller, own = self._caller()
        require_no_meaning(request.options.labels)
        require_bounded(request.options)
        directory = place_of(own, self._root())
        name = image_name(own, request.options.idempotency_key)
        arguments = Checkpoint(own.id, own.namespace, str(directory / name), exit=request.exit)
        async with (
            self._locks.setdefault(caller.key, asyncio.Lock()),
            self._locks.setdefault(f"images {directory}", asyncio.Lock()),
        ):
            if (known := await self._pending(own, request.options, caller)) is not None:
                return operation_message(known)
            found = self._find(own)
            others = await self._written(directory)
            await self._quota.require_room(directory, PREFIX, found.pid if found else 0, others)
            return await self._submit(caller, arguments, request.options)

    async def _written(self, directory: Path) -> list[int]:
        """Return the first processes of the containers whose images are being written to a directory."""
        found = await self._engine.list(Wanted(states=ACTIVE, limit=MOST_LIST))
        targets = [one.target for one in found if isinstance(one.arguments, Checkpoint)]
        there = [target for target in targets if target.image and Path(target.image).parent == directory]
        known = [self._find(OwnContainer(target.namespace, target.container)) for target in there]
        return [one.pid for one in known if one is not None]

    async def SuspendWhenIdle(self, request: wire.SuspendWhenIdleRequest, context: Any) -> wire.Operation:
        caller, own = self._caller(interrupts=False)
        require_bounded(request.options)
        seconds = request.idle.ToTimedelta().total_seconds() or IDLE_SECONDS
        about = wire.Operation(verb="suspend", container=own.id, namespace=own.namespace, requester=str(caller))

        async def submit() -> wire.Operation:
            async with self._locks.setdefault(caller.key, asyncio.Lock()):
                if (known := await self._pending(own, wire.Options(), caller)) is not None:
                    return operation_message(known)
                return await self._submit(caller, Suspend(own.id, own.namespace), wire.Options())

        seconds = min(max(seconds, 0.0), MOST_IDLE_SECONDS)
        look = partial(self._activity, own)
        return self._idleness.begin(caller.key, seconds, request.options.idempotency_key, about, look, submit)

    async def GetOperation(self, request: wire.GetOperationRequest, context: Any) -> wire.Operation:
        """Answer without ending a wait: its caller asks how far it is."""
        caller, own = self._caller(interrupts=False)
        waiting = self._idleness.find(caller.key, request.id)
        if waiting is None or waiting.id == request.id:
            return waiting if waiting is not None else operation_message(await self._own(request.id, own))
        return operation_message(await self._own(waiting.id, own))

    async def CancelOperation(self, request: wire.CancelOperationRequest, context: Any) -> wire.Operation:
        caller, own = self._caller()
        waiting = self._idleness.find(caller.key, request.id)
        if waiting is not None and waiting.id == request.id:
            return waiting
        found = await self._own(waiting.id if waiting is not None else request.id, own)
        if found.scope != caller.key:
            raise Denied(f"operation {found.id} was started by {found.requester}", state="it continues")
        return operation_message(await self._engine.cancel(found.id))

    def _caller(self, *, interrupts: bool = True) -> tuple[Caller, OwnContainer]:
        """Return who calls. A call shows that the container's programs are at work."""
        caller = CALLER.get()
        assert caller.container is not None, "the table of roles lets containers alone call this service"
        if interrupts:
            self._idleness.interrupt(caller.key)
        return caller, caller.container

    async def _submit(self, caller: Caller, arguments: Arguments, options: wire.Options) -> wire.Operation:
        return operation_message(
            await self._engine.submit(submission(arguments, options, str(caller), scope=caller.key))
        )

    async def _pending(self, own: OwnContainer, options: wire.Options, caller: Caller) -> Operation | None:
        """Return the operation that is pending where the request is its repetition. Raises Exhausted."""
        found = await self._engine.list(Wanted(states=ACTIVE, container=own.id))
        for operation in found:
            if not _is_about(operation, own):
                continue
            if operation.key and operation.key == options.idempotency_key and operation.scope == caller.key:
                return operation
            raise Exhausted(
                f"operation {operation.id} ({operation.verb}) of this container has not ended",
                advice="wait for it: `GetOperation`",
            )
        return None

    async def _own(self, id: str, own: OwnContainer) -> Operation:
        found = await self._engine.get(id)
        if not _is_about(found, own):
            raise Denied(f"no operation {id} of this container")
        return found


def require_no_meaning(labels: Iterable[str]) -> None:
    """Raise Invalid for labels by which the agent marks operations, such as those of parked containers."""
    if meant := sorted(name for name in labels if name.startswith(RESERVED)):
        raise Invalid(
            f"labels: {meant[0]!r} begins with {RESERVED}, which containers may not set",
            state="no operation was started",
        )


def _is_about(operation: Operation, own: OwnContainer) -> bool:
    return (operation.target.namespace, operation.target.container) == (own.namespace, own.id)


def place_of(own: OwnContainer, root: Path) -> Path:
    """Return the directory for images of a container: that of its namespace where it is a pod's. Raises Failure."""
    if not own.pod:
        return root
    if not PLAIN.fullmatch(own.pod_namespace):
        raise Failure(
            f"the namespace {own.pod_namespace!r} is not the name of a directory", state="nothing was started"
        )
    return root / own.pod_namespace


def image_name(own: OwnContainer, key: str) -> str:
    """Return the name of a new image; with an idempotency key always the same one."""
    title = own.name if PLAIN.fullmatch(own.name) else re.sub(r"[^a-z0-9]+", "-", own.id.lower())[:12].strip("-")
    if key:
        digest = hashlib.sha256("\0".join((own.namespace, own.id, key)).encode())
        return f"{PREFIX}{title}-{digest.hexdigest()[:16]}"
    return f"{PREFIX}{title}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"
