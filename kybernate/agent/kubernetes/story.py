"""Which of the agent's events appear on a pod, and in which words. Pure.

A reader of `kubectl get events` knows kubelet's events, and neither the node's paths nor ids of containers. So a reason
is one word as kubelet's are, and a message names the image as an annotation would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from kybernate.agent.keeping.parking import PARKED
from kybernate.messages import agent_pb2 as wire

MOST_MESSAGE: Final = 1024  # bytes, as the API server has it
POLICY: Final = "kybernate.io/reason"  # label of an operation that the node's policy has begun
UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Subject:
    """What an event is about: a pod, and one of its containers by name, "" for the whole pod."""

    namespace: str
    pod: str
    uid: str
    container: str = ""


@dataclass(frozen=True)
class Told:
    """An event of Kubernetes, without its subject. `warning`: its type is Warning, else Normal."""

    reason: str
    message: str
    warning: bool = False


def told(event: wire.Event) -> Told | None:
    """Return what the pod of the event's container is to show, None for what needs none."""
    words = STORY.get(event.type)
    return words(event) if words is not None else None


def parked(operation: wire.Operation) -> Told | None:
    """Return what to show of an operation that has ended the container by the node's policy, None of any other one."""
    if PARKED not in operation.labels or operation.state != wire.SUCCEEDED:
        return None
    why = operation.labels.get(POLICY, "")
    ended = f"The node's policy has ended the container, whose state is in {_name(operation.image)}"
    return Told("Parked", f"{ended}{_of(why)}")


def quantity(bytes: int) -> str:
    """Return a number of bytes as people read it: "1.5 GiB"."""
    size, unit = float(bytes), 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {UNITS[unit]}" if unit == 0 else f"{size:.1f} {UNITS[unit]}"


def shortened(text: str, most: int = MOST_MESSAGE) -> str:
    """Return the text in one line of at most so many bytes."""
    line = " ".join(text.split())
    content = line.encode()
    return line if len(content) <= most else content[: most - 3].decode(errors="ignore") + "…"


def _name(image: str) -> str:
    """Return an image's name; its place on the node is of no use to a reader of the pod."""
    return f"image {PurePath(image).name}" if image else "an image"


def _of(detail: str) -> str:
    return f": {detail}" if detail else ""


def _number(fields: Mapping[str, str], name: str) -> float:
    try:
        return float(fields.get(name, ""))
    except ValueError:
        return 0.0


def _cost(event: wire.Event) -> str:
    """Return what an operation took, as far as the event has it."""
    fields = event.fields
    size = int(_number(fields, "bytes") or _number(fields, "vram_bytes"))
    parts = [quantity(size)] if size else []
    if "seconds" in fields:
        parts.append(f"in {_number(fields, 'seconds'):.1f} s")
    found = " ".join(parts)
    if frozen := _number(fields, "frozen_ms"):
        found += f"{', ' if found else ''}frozen for {frozen / 1000:.1f} s"
    return found


def _done(reason: str, words: str) -> Callable[[wire.Event], Told]:
    return lambda event: Told(reason, f"{words.format(image=_name(event.image))}{_of(_cost(event))}")


def _failed(reason: str, words: str) -> Callable[[wire.Event], Told]:
    def say(event: wire.Event) -> Told:
        return Told(reason, f"{words}{_of(event.fields.get('error', '') or event.message)}", warning=True)

    return say


def _operation_failed(event: wire.Event) -> Told | None:
    """Return what to show of an operation of the agent that has failed; most have an event of the shim as well."""
    failed = STORY.get(f"{event.fields.get('verb', '')}.failed")
    return failed(event) if failed is not None else None


STORY: Final[Mapping[str, Callable[[wire.Event], Told | None]]] = {
    "checkpoint.started": lambda event: Told("Checkpointing", f"Writing {_name(event.image)}"),
    "container.checkpointed": _done("Checkpointed", "Wrote {image}"),
    "checkpoint.failed": _failed("CheckpointFailed", "No image was written"),
    "checkpoint.cancelled": lambda event: Told("CheckpointCancelled", "Cancelled: no image was written"),
    "restore.started": lambda event: Told("Restoring", f"Restoring the container from {_name(event.image)}"),
    "container.restored": _done("Restored", "Restored the container from {image}"),
    "restore.failed": _failed("RestoreFailed", "The container was not restored"),
    "restore.cancelled": lambda event: Told("RestoreCancelled", "Cancelled: the container was not restored"),
    "restore.skipped": lambda event: Told("RestoreSkipped", event.message),
    "container.suspended": _done("Suspended", "Moved the container's GPU memory into host memory"),
    "suspend.failed": _failed("SuspendFailed", "The container keeps its GPUs"),
    "suspend.cancelled": lambda event: Told("SuspendCancelled", "Cancelled: the container keeps its GPUs"),
    "container.parked": _done("Parked", "Moved the container's GPU memory from host memory to the disk"),
    "park.failed": _failed("ParkFailed", "The container's GPU memory stays in host memory"),
    "park.cancelled": lambda event: Told("ParkCancelled", "Cancelled: the GPU memory stays in host memory"),
    "container.resumed": _done("Resumed", "Moved the container's GPU memory back"),
    "resume.failed": _failed("ResumeFailed", "The container is still suspended"),
    "resume.cancelled": lambda event: Told("ResumeCancelled", "Cancelled: the container is suspended"),
    "container.stuck": _failed("GPUStuck", "Not all processes are back on their GPUs"),
    "room.awaited": lambda event: Told("WaitingForGPU", event.message),
    "room.granted": lambda event: Told("GPUGranted", event.message),
    "seat.suspended": lambda event: Told("SeatSuspended", event.message),
    "seat.failed": lambda event: Told("SeatFailed", event.message, warning=True),
    "seat.refused": lambda event: Told("SeatRefused", event.message, warning=True),
    "shim.lost": _failed("ShimUnreachable", "The container's shim does not answer"),
    "shim.found": lambda event: Told("ShimReachable", "The container's shim answers again"),
    "operation.failed": _operation_failed,
}  # fmt: skip
