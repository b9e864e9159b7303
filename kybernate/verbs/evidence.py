"""What became of an operation that a shim carries out, from what shim, containerd and disk say. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kybernate.node.failure import Failure, Missing
from kybernate.verbs.errors import NODE_REBOOTED_ADVICE, fault_of
from kybernate.verbs.model import Fault, Observation, Operation, Result, Seen, Step, steps_of
from kybernate_shim.checkpoint.image.manifest import Manifest
from kybernate_shim.messages import shim_pb2 as wire

OUTCOMES = {"succeeded": Seen.SUCCEEDED, "failed": Seen.FAILED, "cancelled": Seen.CANCELLED}


@dataclass(frozen=True)
class Whole:
    """A whole image at the place of a checkpoint."""

    manifest: Manifest
    digest: str


@dataclass(frozen=True)
class Evidence:
    """What was found. `status` is None where the container has no shim that answers; `problem` says why."""

    rebooted: bool = False
    status: wire.Container | None = None
    problem: str = ""
    image: Whole | None = None


def judge(operation: Operation, found: Evidence) -> Observation:
    """Return what became of a checkpoint, a suspend or a resume.

    What the shim says counts first: it knows the operation by its id. Where there is none, a whole image proves that
    a checkpoint succeeded: nothing was at its place when it was journalled.
    """
    status = found.status
    if status is not None and status.operation == operation.id:
        return Observation(Seen.AT_WORK, f"its shim is in the step {status.step!r}" if status.step else "in its shim")
    if status is not None and (ended := next(_ended(status, operation.id), None)):
        return _of_ended(operation, ended)
    if found.image is not None:
        return Observation(Seen.SUCCEEDED, "its image is whole", result=result_of(operation, found.image))
    if found.rebooted:
        error = Failure(
            f"the node was restarted during the {operation.verb}",
            state="there is not a complete image",
            advice=NODE_REBOOTED_ADVICE,
        )
        return Observation(Seen.FAILED, "the node was restarted", fault=fault_of(error))
    if status is None:
        gone = Missing(f"container {operation.target.title} ended during the {operation.verb}: {found.problem}")
        return Observation(Seen.FAILED, "its container has no shim", fault=fault_of(gone))
    return Observation(Seen.ABSENT, "its shim does not know it")


def result_of(operation: Operation, image: Whole) -> Result:
    """Return the numbers of a checkpoint as its image has them."""
    manifest = image.manifest
    steps = tuple(Step(step.name, step.seconds, step.bytes, step.spared) for step in manifest.steps)
    return Result(
        path=operation.target.image,
        image_id=manifest.id,
        manifest_digest=image.digest,
        bytes=manifest.bytes,
        vram_bytes=sum(process.bytes for process in manifest.cuda_processes),
        steps=steps,
    )


def _ended(status: wire.Container, id: str) -> Iterator[wire.Ended]:
    known = ([status.last] if status.HasField("last") else []) + list(status.earlier)
    return (ended for ended in known if ended.operation == id)


def _of_ended(operation: Operation, ended: wire.Ended) -> Observation:
    seen = OUTCOMES.get(ended.outcome, Seen.FAILED)
    result = Result(
        path=ended.path,
        manifest_digest=ended.manifest_digest,
        bytes=ended.bytes,
        frozen_ms=ended.frozen_ms,
        vram_bytes=ended.vram_bytes,
        steps=steps_of(ended.steps),
    )
    fault = Fault("ShimRefused", ended.error or "its shim gives no reason", ended.state).trimmed()
    return Observation(
        seen,
        f"its shim says that it has {ended.outcome}" if seen != Seen.CANCELLED else (ended.error or "it was undone"),
        result=result if seen == Seen.SUCCEEDED else None,
        fault=fault if seen == Seen.FAILED else None,
    )
