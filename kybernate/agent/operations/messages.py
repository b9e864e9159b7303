"""Operations and requests for them, to and from the messages of agent_pb2."""

from __future__ import annotations

from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from kybernate.agent.operations.store import Wanted
from kybernate.messages import agent_pb2 as wire
from kybernate.verbs.every import VERBS
from kybernate.verbs.model import Arguments, Fault, Operation, Progress, Result, State, Step, Submission

BY_REQUEST = {kind.request: kind for kind in VERBS.values()}

STATES: dict[State, wire.OperationState] = {
    State.PENDING: wire.PENDING,
    State.RUNNING: wire.RUNNING,
    State.CANCELLING: wire.CANCELLING,
    State.SUCCEEDED: wire.SUCCEEDED,
    State.FAILED: wire.FAILED,
    State.CANCELLED: wire.CANCELLED,
}


def submission_of(request: Any, requester: str, *, scope: str = "") -> Submission:
    """Return what a request asks for. `requester` and `scope` come from the connection, never from the request."""
    return submission(arguments_of(request), request.options, requester, scope=scope)


def submission(arguments: Arguments, options: wire.Options, requester: str, *, scope: str = "") -> Submission:
    """Return a submission of what the arguments ask for."""
    return Submission(
        arguments=arguments,
        requester=requester,
        key=options.idempotency_key,
        scope=scope,
        seconds=_seconds(options.deadline),
        labels=dict(options.labels),
    )


def arguments_of(request: Message) -> Arguments:
    """Return what a request asks for, without its options."""
    return BY_REQUEST[type(request)].of(request)


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
        pid=result.pid,
        source=result.source,
    )


def _error(fault: Fault | None) -> wire.Error | None:
    if fault is None:
        return None
    return wire.Error(type=fault.type, message=fault.message, state=fault.state, advice=fault.advice)
