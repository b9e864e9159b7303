"""What a caller of the agent can do differently: it cannot be reached, it refused the call, the operation failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import grpc
from google.protobuf.message import DecodeError

from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Failure

CUT_OFF = ("Socket closed", "Connection reset")  # gRPC's words; TLS 1.3 has no others for a client that is not accepted
ERROR_KEY = "kybernate-error-bin"  # of the trailing metadata: a wire.Error


class AgentUnreachable(Failure):
    """No agent answers at the address."""

    advice = "is the agent running? `systemctl status kybernate-agent`, or start it with `kybernate agent`"


class AgentRefused(Failure):
    """The agent answered a call with an error. `code` is gRPC's name of it, `type` the name of the fact."""

    def __init__(self, message: str, *, code: str, type: str = "", state: str = "", advice: str = "") -> None:
        super().__init__(message, state=state, advice=advice)
        self.code = code
        self.type = type


class NotFinished(Failure):
    """The operation has not ended in the time that its caller wanted to wait; it continues."""

    advice = "`kybernate wait OPERATION` waits on, `kybernate cancel OPERATION` undoes it"


class OperationFailed(Failure):
    """The operation ended without success. `operation` is its last state, `type` the name of what went wrong."""

    def __init__(self, operation: wire.Operation) -> None:
        error = operation.error
        super().__init__(self._words(operation), state=error.state, advice=error.advice)
        self.operation = operation
        self.type = error.type

    @staticmethod
    def _words(operation: wire.Operation) -> str:
        return f"{operation.verb} of {_subject(operation)} failed: {operation.error.message}"


class OperationCancelled(OperationFailed):
    """The operation was cancelled, and what it had done was undone."""

    @staticmethod
    def _words(operation: wire.Operation) -> str:
        return f"{operation.verb} of {_subject(operation)} was cancelled"


def _subject(operation: wire.Operation) -> str:
    return operation.container_title or operation.container or operation.image


def require_success(operation: wire.Operation) -> wire.Operation:
    """Return an operation that has ended well. Raises OperationFailed and OperationCancelled."""
    if operation.state == wire.CANCELLED:
        raise OperationCancelled(operation)
    if operation.state != wire.SUCCEEDED:
        raise OperationFailed(operation)
    return operation


@contextmanager
def translated(address: str) -> Iterator[None]:
    """Turn gRPC's errors into facts."""
    try:
        yield
    except grpc.RpcError as error:
        raise fact_of(error, address) from error


def fact_of(error: grpc.RpcError, address: str) -> Failure:
    """Return what an error of gRPC means."""
    code, details = error.code(), error.details() or ""
    sent = _sent(error)
    if sent is not None:
        return AgentRefused(sent.message, code=code.name, type=sent.type, state=sent.state, advice=sent.advice)
    if code == grpc.StatusCode.UNAVAILABLE:
        return AgentUnreachable(f"no agent answers on {address}: {details}", advice=_advice(address, details))
    return AgentRefused(details or code.name, code=code.name)


def _advice(address: str, details: str) -> str:
    """Return what to do about an agent of another machine that has ended the connection, "" for what is usual."""
    if address.startswith("unix:") or not any(words in details for words in CUT_OFF):
        return ""
    return (
        "the agent does not accept this client, or has ended: compare its certificate (`openssl x509 -noout -dates"
        " -issuer -in FILE`) with `tls.client_ca` there; the agent's log has the reason (`connection.refused`)"
    )


def _sent(error: grpc.RpcError) -> wire.Error | None:
    """Return the error in the agent's own words, where the answer has it."""
    metadata = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())  # its stub has no items
    content = next((value for key, value in metadata if key == ERROR_KEY), None)
    if not isinstance(content, bytes):
        return None
    try:
        return wire.Error.FromString(content)
    except DecodeError:
        return None
