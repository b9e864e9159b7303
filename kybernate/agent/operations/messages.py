"""Requests for operations, from the messages of agent_pb2."""

from __future__ import annotations

from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from kybernate.agent.operations.store import Wanted
from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Invalid
from kybernate.registry.model import require_labels
from kybernate.verbs.every import VERBS
from kybernate.verbs.model import Arguments, Submission
from kybernate.verbs.wire import STATES, operation_message

BY_REQUEST = {kind.request: kind for kind in VERBS.values()}

LONGEST_KEY = 256  # characters of an idempotency key


def submission_of(request: Any, requester: str, *, scope: str = "") -> Submission:
    """Return what a request asks for. `requester` and `scope` come from the connection, never from the request."""
    return submission(arguments_of(request), request.options, requester, scope=scope)


def submission(arguments: Arguments, options: wire.Options, requester: str, *, scope: str = "") -> Submission:
    """Return a submission of what the arguments ask for. Raises Invalid."""
    require_bounded(options)
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


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


__all__ = ["arguments_of", "operation_message", "submission", "submission_of", "wanted_of"]


def require_bounded(options: wire.Options) -> None:
    """Raise Invalid for more or longer labels, or a longer key, than are kept: a container chooses them."""
    require_labels(options.labels, state="no operation was started")
    if len(options.idempotency_key) > LONGEST_KEY:
        raise Invalid(
            f"the idempotency key has {len(options.idempotency_key)} characters, at most {LONGEST_KEY} are kept",
            state="no operation was started",
        )
