"""Operations as messages of agent_pb2, as callers see them: the agent's, and those of a command without one."""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp

from kybernate.messages import agent_pb2 as wire
from kybernate.verbs.model import Fault, Operation, Progress, Result, State, Step

STATES: dict[State, wire.OperationState] = {
    State.PENDING: wire.PENDING,
    State.RUNNING: wire.RUNNING,
    State.CANCELLING: wire.CANCELLING,
    State.SUCCEEDED: wire.SUCCEEDED,
    State.FAILED: wire.FAILED,
    State.CANCELLED: wire.CANCELLED,
}


def operation_message(operation: Operation) -> wire.Operation:
    """Return an operation as callers see it."""
    target = operation.target
    return wire.Operation(
        id=operation.id,
        verb=operation.verb,
        state=STATES[operation.state],
        container=target.container,
        container_title=target.title,
        namespace=target.namespace,
        other_container=target.other,
        other_container_title=target.other_title,
        image=target.image,
        idempotency_key=operation.key,
        labels=operation.labels,
        requester=operation.requester,
        created=_time(operation.created),
        started=_time(operation.started),
        ended=_time(operation.ended),
        deadline=_time(operation.deadline),
        steps=[_step(step) for step in operation.steps],
        progress=_progress(operation.progress),
        result=_result(operation.result),
        error=_error(operation.fault),
        notes=operation.notes,
        revision=operation.revision,
    )


def _time(seconds: float | None) -> Timestamp | None:
    if seconds is None:
        return None
    time = Timestamp()
    time.FromNanoseconds(round(seconds * 1e6) * 1000)  # microseconds: a float of today has no more
    return time


def _step(step: Step) -> wire.Step:
    return wire.Step(name=step.name, seconds=step.seconds, bytes=step.bytes, spared_bytes=step.spared_bytes)


def _progress(progress: Progress | None) -> wire.Progress | None:
    if progress is None:
        return None
    return wire.Progress(
        step=progress.step,
        done_bytes=progress.done_bytes,
        total_bytes=progress.total_bytes,
        seconds=progress.seconds,
        seconds_left=progress.seconds_left,
        waits_for=progress.waits_for,
    )


def _result(result: Result | None) -> wire.Result | None:
    if result is None:
        return None
    return wire.Result(
        path=result.path,
        image_id=result.image_id,
        manifest_digest=result.manifest_digest,
        bytes=result.bytes,
        frozen_ms=result.frozen_ms,
        vram_bytes=result.vram_bytes,
        arena_bytes=result.arena_bytes,
        arena_reasons=result.arena_reasons,
        left_vram_bytes=result.left_vram_bytes,
        left_spared_bytes=result.left_spared_bytes,
        pid=result.pid,
        source=result.source,
    )


def _error(fault: Fault | None) -> wire.Error | None:
    if fault is None:
        return None
    return wire.Error(type=fault.type, message=fault.message, state=fault.state, advice=fault.advice)
