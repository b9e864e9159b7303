"""How a service is offered: a table of methods by name, each with its request message and its handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError, Message

from . import ttrpc_pb2 as wire
from .codes import Code, RpcError
from .peer import Credentials


@dataclass(frozen=True, slots=True)
class Call:
    """What is known about a call in addition to its message. `deadline` is in the event loop's time.

    `peer` is the process that connected, None for a call that did not come through a socket.
    """

    service: str
    method: str
    metadata: Mapping[str, str]
    deadline: float | None
    peer: Credentials | None = None


@dataclass(frozen=True, slots=True)
class Method:
    """One method. `handle` gets a message of type `request`; an exception that it raises is the call's answer.

    A handler runs to its end even when its caller has gone, since half an operation is of no use. Only `cancellable`
    ones, which merely wait, are cancelled with their connection.
    """

    request: type[Message]
    handle: Callable[[Any, Call], Awaitable[Message]]
    cancellable: bool = False


Services = Mapping[str, Mapping[str, Method]]


def find(services: Services, request: wire.Request) -> tuple[Method, Message]:
    """Return the method that a request names, and its decoded message.

    Raises RpcError: UNIMPLEMENTED for a name that is not in the table, INTERNAL for a payload of another form.
    """
    methods = services.get(request.service)
    if methods is None:
        raise RpcError(Code.UNIMPLEMENTED, f"service {request.service}: not implemented")
    method = methods.get(request.method)
    if method is None:
        raise RpcError(Code.UNIMPLEMENTED, f"method {request.service}/{request.method}: not implemented")
    try:
        return method, method.request.FromString(request.payload)
    except DecodeError as error:
        raise RpcError(
            Code.INTERNAL, f"payload of {request.service}/{request.method} cannot be decoded: {error}"
        ) from error


def describe(request: wire.Request, now: float, peer: Credentials | None = None) -> Call:
    """Return the Call of a request received at `now`. Where metadata has a key twice, the first value counts."""
    metadata: dict[str, str] = {}
    for pair in request.metadata:
        metadata.setdefault(pair.key, pair.value)
    deadline = now + request.timeout_nano / 1e9 if request.timeout_nano else None
    return Call(request.service, request.method, metadata, deadline, peer)
