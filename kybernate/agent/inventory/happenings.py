"""Which durable events follow from two states of a container. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kybernate.messages import agent_pb2 as api
from kybernate.node.lookup import LIVE, STARTED
from kybernate_shim.oci.annotations import RESTORE_FROM

DONE = {
    "checkpoint": "checkpointed", "restore": "restored", "suspend": "suspended", "park": "parked", "resume": "resumed",
}  # fmt: skip
LONG = {"checkpoint": "to", "restore": "from"}
STATES = {  # of the GPU memory, that an operation leads to
    "suspend": api.Container.SUSPENDED, "resume": api.Container.ATTACHED,
}  # fmt: skip


@dataclass(frozen=True)
class Happening:
    """An event of a container."""

    type: str
    level: Literal["info", "warning", "error"]
    message: str


def happenings(old: api.Container | None, new: api.Container | None) -> Iterator[Happening]:
    """Yield what has happened between two looks at a container; None where there was or is none."""
    before, now = old or api.Container(), new or api.Container()
    title = (new or old or before).title
    if old is None:
        yield Happening("container.created", "info", f"container {title} was created")
    yield from _of_task(before, now, title)
    if now.gpu == api.Container.STUCK != before.gpu:
        why = now.note or "not all of its processes are back on their GPUs"
        yield Happening("container.stuck", "error", f"container {title}: {why}")
    if new is not None and bool(now.problem) != bool(before.problem):
        if now.problem:
            yield Happening("shim.lost", "warning", f"the shim of container {title} does not answer: {now.problem}")
        else:
            yield Happening("shim.found", "info", f"the shim of container {title} answers again")
    if new is None:
        yield Happening("container.removed", "info", f"container {title} was removed")


def operation_started(title: str, verb: str, image: str) -> Happening | None:
    """Return the event for an operation that a shim has begun; None for one that takes a moment, or is unknown."""
    if verb not in LONG:
        return None
    where = f" {LONG[verb]} {image}" if image else ""
    return Happening(f"{verb}.started", "info", f"the {verb} of container {title}{where} has begun")


def restore_skipped(container: str, of: str, image: str) -> Happening:
    """Return what it means that a container of a pod that names an image is started as usual."""
    why = f"image {image} is of container {of}, so {container} is started as usual"
    return Happening("restore.skipped", "info", f"{why}; {RESTORE_FROM}.{container} would restore it")


def operation_ended(title: str, verb: str, outcome: str, image: str, error: str = "") -> Happening | None:
    """Return the event for an operation that a shim has ended; None for a verb that is not known."""
    if verb not in DONE:
        return None
    if outcome == "done":
        where = f" to {image}" if verb == "checkpoint" else f" from {image}" if image else ""
        return Happening(f"container.{DONE[verb]}", "info", f"container {title} was {DONE[verb]}{where}")
    if outcome == "nothing to do":
        return None
    if outcome == "cancelled":
        return Happening(f"{verb}.cancelled", "info", f"the {verb} of container {title} was cancelled")
    cause = f"{outcome}: {error}" if error and outcome != "failed" else error or outcome
    return Happening(f"{verb}.failed", "warning", f"the {verb} of container {title} failed: {cause}")


def gpu_moved(noted: api.Container.GpuState, now: api.Container) -> Happening | None:
    """Return the suspend or resume that a state shows and that has not been `noted` yet, as its event was missed."""
    if now.gpu == noted or now.gpu not in STATES.values() or not noted:
        return None
    verb = next(verb for verb, state in STATES.items() if state == now.gpu)
    return operation_ended(now.title, verb, "done", "")


def _of_task(before: api.Container, now: api.Container, title: str) -> Iterator[Happening]:
    was, runs = before.state in LIVE, now.state in LIVE
    another = was and runs and before.pid != now.pid and before.pid and now.state != api.Container.CREATED
    if (was and not runs) or (another and before.state != api.Container.CREATED):
        yield Happening("container.ended", "info", f"the task of container {title} has ended")
    if now.state in STARTED and (before.state not in STARTED or another):
        yield Happening("container.started", "info", f"container {title} runs as process {now.pid}")
    if api.Container.PAUSED in (now.state, before.state) and now.state != before.state and runs:
        if now.state == api.Container.PAUSED:
            yield Happening("container.paused", "info", f"container {title} was paused")
        elif now.state == api.Container.RUNNING and not another:
            yield Happening("container.unpaused", "info", f"container {title} runs again")
