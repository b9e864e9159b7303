"""Operations and requests for them, to and from the messages of agent_pb2."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from kybernate.agent.operations.errors import RequestInvalid
from kybernate.agent.operations.model import (
    Arguments,
    Checkpoint,
    Copy,
    Delete,
    Evict,
    Export,
    Fault,
    Import,
    Operation,
    Progress,
    Restore,
    Result,
    Resume,
    State,
    Step,
    Submission,
    Suspend,
    Swap,
    Verify,
)
from kybernate.agent.operations.store import Wanted
from kybernate.messages import agent_pb2 as wire
from kybernate.registry.model import require_labels

Request = (
    wire.CheckpointRequest
    | wire.RestoreRequest
    | wire.SuspendRequest
    | wire.ResumeRequest
    | wire.SwapRequest
    | wire.VerifyImageRequest
    | wire.DeleteImageRequest
    | wire.ImportImageRequest
    | wire.ExportImageRequest
    | wire.CopyImageRequest
    | wire.EvictImageRequest
)
STATES: dict[State, wire.OperationState] = {
    State.PENDING: wire.PENDING,
    State.RUNNING: wire.RUNNING,
    State.CANCELLING: wire.CANCELLING,
    State.SUCCEEDED: wire.SUCCEEDED,
    State.FAILED: wire.FAILED,
    State.CANCELLED: wire.CANCELLED,
}

LONGEST_KEY = 256  # characters of an idempotency key


def submission_of(request: Request, requester: str, *, scope: str = "") -> Submission:
    """Return what a request asks for. `requester` and `scope` come from the connection, never from the request."""
    return submission(arguments_of(request), request.options, requester, scope=scope)


def submission(arguments: Arguments, options: wire.Options, requester: str, *, scope: str = "") -> Submission:
    """Return a submission of what the arguments ask for. Raises LabelInvalid and RequestInvalid."""
    require_labels(options.labels, state="no operation was begun")
    if len(options.idempotency_key) > LONGEST_KEY:
        raise RequestInvalid(
            f"the idempotency key has {len(options.idempotency_key)} characters, at most {LONGEST_KEY} are kept",
            state="no operation was begun",
        )
    return Submission(
        arguments=arguments,
        requester=requester,
        key=options.idempotency_key,
        scope=scope,
        seconds=_seconds(options.deadline),
        labels=dict(options.labels),
    )


def arguments_of(request: Request) -> Arguments:
    """Return what a request asks for, without its options."""
    match request:
        case wire.CheckpointRequest():
            return Checkpoint(
                name=request.name,
                namespace=request.namespace,
                path=request.path,
                exit=request.exit,
                tcp=request.tcp,
                without_rootfs=request.without_rootfs,
                force=request.force,
                hold=request.hold,
                hold_timeout=_seconds(request.hold_timeout),
                volumes=request.volumes,
                max_freeze=request.max_freeze_seconds,
            )
        case wire.RestoreRequest():
            return Restore(
                image=request.image,
                name=request.name,
                namespace=request.namespace,
                container_image=request.container_image,
                runtime=request.runtime,
                snapshotter=request.snapshotter,
                log_path=request.log_path,
                force=request.force,
                from_store=request.from_store,
            )
        case wire.SuspendRequest():
            return Suspend(request.name, request.namespace, _seconds(request.lock_timeout))
        case wire.ResumeRequest():
            return Resume(
                request.name,
                request.namespace,
                _seconds(request.room_timeout),
                _seconds(request.restore_timeout),
            )
        case wire.SwapRequest():
            return Swap(request.leaving, request.coming, request.namespace, _seconds(request.room_timeout))
        case wire.VerifyImageRequest():
            return Verify(request.image)
        case wire.DeleteImageRequest():
            return Delete(request.image, request.force)
        case wire.ImportImageRequest():
            return Import(request.path, request.name, request.namespace)
        case wire.ExportImageRequest():
            return Export(request.image, request.path)
        case wire.CopyImageRequest():
            return Copy(request.image, request.tier, request.priority or "request", request.demote)
        case wire.EvictImageRequest():
            return Evict(request.image, request.tier)


def wanted_of(request: wire.ListOperationsRequest) -> Wanted:
    """Return which operations a list has; states that this release does not know match none."""
    known = {number: state for state, number in STATES.items()}
    states = tuple(known[number] for number in request.states if number in known)
    return Wanted(states, request.container, request.limit, request.before)


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


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


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
        pid=result.pid,
        source=result.source,
    )


def _error(fault: Fault | None) -> wire.Error | None:
    if fault is None:
        return None
    return wire.Error(type=fault.type, message=fault.message, state=fault.state, advice=fault.advice)
