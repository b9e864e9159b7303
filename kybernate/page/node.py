"""A node's agent as the source of the page's data."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from kybernate.client import AgentRefused, AgentUnreachable
from kybernate.client.asynchronous import AsyncAgent
from kybernate.client.watching import Position
from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Failure
from kybernate.node.lookup import gpu_word, shown_gpu, task_word
from kybernate.node.words import word
from kybernate.page import view
from kybernate.page.source import Action, ActionRefused, LogAbsent

LOG_LINES: Final = 500  # that were written before and are shown
FIRST_WAIT: Final = 0.1  # seconds until the next attempt to reach the agent
MOST_WAIT: Final = 2.0


class NodeSource:
    """The agent at an address; "" means the node's own socket."""

    def __init__(self, address: str = "") -> None:
        self._address = address

    async def changes(self) -> AsyncIterator[view.Change]:
        """Yield what the agent reports, without an end; see `Source.changes`."""
        wait, position = FIRST_WAIT, Position()
        while True:
            try:
                async with AsyncAgent(self._address) as agent:
                    node = await agent.node()
                    yield view.Found(node.name, tuple(sorted(node.versions.items())))
                    async for change in agent.watch(revision=position.revision, instance=position.instance):
                        wait = FIRST_WAIT
                        position.take(change)
                        for one in changes_of(change):
                            yield one
                yield view.Lost("the agent has ended the connection", AgentUnreachable.advice)
            except Failure as failure:
                yield view.Lost(str(failure), failure.advice)
            await asyncio.sleep(wait)
            wait = min(2 * wait, MOST_WAIT)

    async def act(self, action: Action, key: str) -> str:
        """Begin an operation of the agent, or pin an image; see `Source.act`."""
        namespace, _, id = key.rpartition("/")
        try:
            async with AsyncAgent(self._address) as agent:
                match action:
                    case Action.WAKE:
                        operation = await agent.wake(id, namespace=namespace)
                    case Action.SLEEP:
                        operation = await agent.sleep(id, namespace=namespace)
                    case Action.CHECKPOINT:
                        operation = await agent.checkpoint(id, namespace=namespace)
                    case Action.RESTORE:
                        operation = await agent.restore(key)
                    case Action.PIN | Action.UNPIN:
                        image = await agent.pin(key, pinned=action is Action.PIN)
                        return f"{image.name} is {'pinned' if image.pinned else 'no longer pinned'}."
        except (AgentRefused, AgentUnreachable) as failure:
            raise ActionRefused(str(failure), state=failure.state, advice=failure.advice) from failure
        subject = operation.state.container_title or operation.state.image or key
        return f"{operation.state.verb} of {subject} has begun (operation {operation.id})."

    async def log(self, container: view.Container) -> AsyncIterator[str]:
        """Yield the lines of a container's output as the agent reads them; see `Source.log`."""
        namespace, _, id = container.key.rpartition("/")
        try:
            async with AsyncAgent(self._address) as agent:
                async for line in agent.log(id, namespace, lines=LOG_LINES, follow=True):
                    yield f"{line.text} […]" if line.cut else line.text
        except AgentRefused as failure:
            raise LogAbsent(str(failure), advice=failure.advice) from failure


def changes_of(change: wire.Change) -> tuple[view.Change, ...]:
    """Return what a message of the agent's Watch means to the page."""
    if change.bookmark == wire.BOOKMARK_SNAPSHOT_BEGIN:
        return (view.Begin(),)
    if change.bookmark == wire.BOOKMARK_SNAPSHOT_END:
        return (view.End(),)
    object = _object(change)
    if object is None:
        return ()
    return (view.Gone(object) if change.removed else view.Put(object),)


def _object(change: wire.Change) -> view.Object | None:
    kind = change.WhichOneof("object")
    return SHOWN[kind](getattr(change, kind)) if kind in SHOWN else None  # an agent of a later release has more


def _container(one: wire.Container) -> view.Container | None:
    if one.sandbox or one.foreign:
        return None
    return view.Container(
        key=f"{one.namespace}/{one.id}",
        title=one.title,
        image=one.image,
        state=task_word(one.state),
        gpu=shown_gpu(gpu_word(one.gpu), one.parked_bytes),
        host_bytes=one.vram_bytes,
        gpus=tuple(one.gpu_uuids),
        operation=one.operation,
        note=one.note,
        problem=one.problem,
        workload=one.workload,
        started=_seconds(one, "started"),
        restored_from=one.restored_from,
        pod_namespace=one.pod_namespace,
        pod=one.pod,
        name=one.name,
        in_flight=one.in_flight,
        waits_for=one.waits_for,
    )


def _operation(one: wire.Operation) -> view.Operation:
    return view.Operation(
        key=one.id,
        verb=one.verb,
        state=word(wire.OperationState, one.state),
        container=f"{one.namespace}/{one.container}" if one.container else "",
        subject=one.container_title or one.container or one.image,
        requester=one.requester,
        created=_seconds(one, "created"),
        ended=_seconds(one, "ended"),
        step=one.progress.step,
        done=one.progress.done_bytes,
        total=one.progress.total_bytes,
        seconds_left=one.progress.seconds_left,
        error=one.error.message,
        advice=one.error.advice,
        steps=tuple(view.Step(step.name, step.seconds, step.bytes) for step in one.steps),
    )


def _image(one: wire.Image) -> view.Image:
    source = "/".join(part for part in (one.source.namespace, one.source.pod, one.source.container) if part)
    return view.Image(
        key=one.id,
        name=one.name,
        source=source,
        created=_seconds(one, "created"),
        bytes=one.bytes,
        vram_bytes=one.vram_bytes,
        tiers=tuple(sorted({copy.tier for copy in one.replicas if copy.state == wire.COMPLETE})),
        pinned=one.pinned,
        states=tuple(one.states),
        restore_seconds=one.last_restore_seconds,
    )


def _gpu(one: wire.Gpu) -> view.Gpu:
    shares = tuple(view.Share(f"{share.namespace}/{share.container}", share.bytes) for share in one.shares)
    return view.Gpu(one.uuid, one.index, one.model, one.total_bytes, one.used_bytes, shares)


def _seat(one: wire.Seat) -> view.Seat:
    return view.Seat(
        key=one.name,
        profile=one.profile,
        group=one.group,
        gpus=tuple(one.gpus),
        status=word(wire.Seat.Status, one.status),
        since=_seconds(one, "since"),
        container=f"{one.namespace}/{one.container}" if one.container else "",
        title=one.container_title,
        priority=one.priority,
        need=one.need_bytes,
        held=one.held_bytes,
        busy=one.busy,
        waits=tuple(request.cause for request in one.requests),
        reason=one.reason,
        before=tuple(one.before),
        turn_at=_seconds(one, "turn_at"),
        failures=one.failures,
        retry_at=_seconds(one, "retry_at"),
        error=one.error,
        stands_by_for=one.stands_by_for,
    )


def _tier(one: wire.Tier) -> view.Tier:
    return view.Tier(one.name, one.path, one.capacity_bytes, one.used_bytes, one.free_bytes, one.images)


def _event(one: wire.Event) -> view.Event:
    return view.Event(one.id, _seconds(one, "time"), one.type, one.level, one.message, one.container)


def _seconds(message: Message, field: str) -> float:
    time: Timestamp = getattr(message, field)
    return time.seconds + time.nanos / 1e9


# By the name of the object in a Change.
SHOWN: Final[Mapping[str, Callable[[Any], view.Object | None]]] = {
    "container": _container,
    "event": _event,
    "gpu": _gpu,
    "image": _image,
    "operation": _operation,
    "seat": _seat,
    "tier": _tier,
}
