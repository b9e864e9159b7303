"""Which gRPC code a failure becomes, in one table, and what else of it a client gets.

The message is the status's. Type, state and advice are in the trailing metadata `kybernate-error-bin`, as an Error of
agent_pb2.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc

from kybernate.agent.access.wrapping import Answer, wrapped
from kybernate.messages.agent_pb2 import Error
from kybernate.node.failure import Failure
from kybernate_shim.linux.kernel_text import plain

DETAILS: Final = "kybernate-error-bin"
DEFAULT: Final = grpc.StatusCode.FAILED_PRECONDITION  # refused as things are
LONGEST: Final = 2048  # characters of each text; clients limit metadata to 8 KiB
# By the names of classes, because a parent's row counts for what derives from it. A test compares them with the code.
CODES: Final[Mapping[grpc.StatusCode, tuple[str, ...]]] = {
    grpc.StatusCode.NOT_FOUND: ("Missing",),
    grpc.StatusCode.INVALID_ARGUMENT: ("Ambiguous", "Invalid"),
    grpc.StatusCode.ALREADY_EXISTS: ("Claimed",),
    grpc.StatusCode.PERMISSION_DENIED: ("Denied",),
    grpc.StatusCode.UNAUTHENTICATED: ("CertificateExpired",),
    grpc.StatusCode.RESOURCE_EXHAUSTED: ("Exhausted", "QuotaReached", "StoreFull"),
    grpc.StatusCode.UNAVAILABLE: (
        "ContainerdUnreachable", "JournalUnusable", "ShimGone", "Unavailable",
    ),
    grpc.StatusCode.DEADLINE_EXCEEDED: ( "TimedOut",),
    grpc.StatusCode.UNIMPLEMENTED: ("ShimTooOld",),
    grpc.StatusCode.DATA_LOSS: ("RegistryDamaged",),
}  # fmt: skip
_BY_NAME: Final = {name: code for code, names in CODES.items() for name in names}


def code_of(error: Failure) -> grpc.StatusCode:
    """Return the code of a failure: that of its class, or of the nearest parent that has one."""
    names = (kind.__name__ for kind in type(error).__mro__)
    return next((_BY_NAME[name] for name in names if name in _BY_NAME), DEFAULT)


def details_of(error: Failure) -> bytes:
    """Return what a client gets in addition to code and message."""
    texts = (str(error), error.state, error.advice)
    message, state, advice = (plain(text)[:LONGEST] for text in texts)
    return Error(type=type(error).__name__, message=message, state=state, advice=advice).SerializeToString()


@dataclass
class Translate(grpc.aio.ServerInterceptor):
    """Answers a call that fails. What is no Failure is a defect of the agent: the log has it, and not the client."""

    log: Any

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        method = details.method

        @asynccontextmanager
        async def around(request: Any, context: Any) -> AsyncIterator[Answer]:
            try:
                yield Answer()
            except Failure as error:
                metadata = ((DETAILS, details_of(error)),)
                await context.abort(code_of(error), plain(str(error))[:LONGEST], trailing_metadata=metadata)
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                self.log.error("call.failed", method=method, error=repr(error), exc_info=True)
                await context.abort(
                    grpc.StatusCode.INTERNAL, "an unexpected error, which is in the agent's log as `call.failed`"
                )

        return wrapped(handler, around)
