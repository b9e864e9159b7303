"""Puts something around each call of a gRPC handler, whatever its kind, which interceptors of grpc.aio cannot."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import grpc


@dataclass
class Answer:
    """What a call of one reply has answered, None before and for streams.

    `passes` is called with each message before it is sent, of either kind, and with None once one of a stream is.
    """

    message: Any = None
    passes: Callable[[Any], None] = lambda message: None


Around = Callable[[Any, grpc.aio.ServicerContext[Any, Any]], AbstractAsyncContextManager[Answer]]


def wrapped(handler: Any, around: Around) -> Any:
    """Return the handler with `around(request, context)` entered before each call and left after it."""
    kind = f"{_kind(handler.request_streaming)}_{_kind(handler.response_streaming)}"
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    behavior = _behavior(getattr(handler, kind), around)
    return make(behavior, handler.request_deserializer, handler.response_serializer)


def _kind(streaming: bool) -> str:
    return "stream" if streaming else "unary"


def _behavior(inner: Any, around: Around) -> Any:
    async def call(request: Any, context: Any) -> Any:
        async with around(request, context) as answer:
            answer.message = await inner(request, context)
            answer.passes(answer.message)
            return answer.message

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        async with around(request, context) as answer:
            async for message in inner(request, context):
                answer.passes(message)
                yield message
                answer.passes(None)

    return stream if inspect.isasyncgenfunction(inner) else call
