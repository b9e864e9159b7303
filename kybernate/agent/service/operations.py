"""The service of operations: requests become submissions of the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing
from typing import Any, Final, ParamSpec, TypeVar

from kybernate.agent.access.caller import CALLER
from kybernate.agent.operations.engine import Engine
from kybernate.agent.operations.messages import operation_message, submission_of, wanted_of
from kybernate.messages import agent_pb2 as wire
from kybernate.messages.agent_pb2_grpc import OperationsServicer
from kybernate.verbs.every import VERBS

MOST_LIST_BYTES: Final = 32 << 20  # what is older is asked for by `before`


P = ParamSpec("P")
S = TypeVar("S")


def with_verbs(servicer: Callable[P, S]) -> Callable[P, S]:
    """Return a servicer, which has an `engine`, with a method for each verb of its service, see `every.VERBS`.

    The request becomes a submission in the caller's name.
    """

    async def submitted(self: Any, request: Any, context: Any) -> wire.Operation:
        engine: Engine = self.engine
        return operation_message(await engine.submit(submission_of(request, str(CALLER.get()))))

    for kind in VERBS.values():
        service, _, method = kind.call.partition("/")
        if service == servicer.__name__:
            setattr(servicer, method, submitted)
    return servicer


def fitting(operations: Iterable[wire.Operation]) -> Iterator[wire.Operation]:
    """Yield as many operations as fit into a message: labels and errors of a container's are as long as it likes."""
    left = MOST_LIST_BYTES
    for one in operations:
        left -= one.ByteSize()
        if left < 0:
            return
        yield one


class Operations(OperationsServicer):
    """Every call answers as soon as the operation is in the journal."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def GetOperation(self, request: wire.GetOperationRequest, context: Any) -> wire.Operation:
        return operation_message(await self.engine.get(request.id))

    async def ListOperations(self, request: wire.ListOperationsRequest, context: Any) -> wire.ListOperationsResponse:
        found = await self.engine.list(wanted_of(request))
        return wire.ListOperationsResponse(operations=fitting(map(operation_message, found)))

    async def WatchOperation(self, request: wire.GetOperationRequest, context: Any) -> AsyncIterator[wire.Operation]:
        async with aclosing(self.engine.watch(request.id)) as operations:  # type: ignore[type-var]
            async for operation in operations:
                yield operation_message(operation)

    async def CancelOperation(self, request: wire.CancelOperationRequest, context: Any) -> wire.Operation:
        return operation_message(await self.engine.cancel(request.id))
