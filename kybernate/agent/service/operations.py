"""The service of operations: requests become submissions of the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import aclosing
from typing import Any, Final

from kybernate.agent.access.caller import CALLER
from kybernate.agent.keeping.parking import Parking
from kybernate.agent.operations.engine import Engine
from kybernate.agent.operations.messages import Request, operation_message, submission_of, wanted_of
from kybernate.messages import agent_pb2 as wire
from kybernate.messages.agent_pb2_grpc import OperationsServicer

MOST_LIST_BYTES: Final = 32 << 20  # what is older is asked for by `before`


async def submitted(engine: Engine, request: Request) -> wire.Operation:
    """Submit what a request asks for in the caller's name."""
    return operation_message(await engine.submit(submission_of(request, str(CALLER.get()))))


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

    def __init__(self, engine: Engine, parking: Parking) -> None:
        self._engine = engine
        self._parking = parking

    async def Checkpoint(self, request: wire.CheckpointRequest, context: Any) -> wire.Operation:
        return await submitted(self._engine, request)

    async def Restore(self, request: wire.RestoreRequest, context: Any) -> wire.Operation:
        return await submitted(self._engine, request)

    async def Suspend(self, request: wire.SuspendRequest, context: Any) -> wire.Operation:
        return await submitted(self._engine, request)

    async def Resume(self, request: wire.ResumeRequest, context: Any) -> wire.Operation:
        parked = await self._parking.woken(request.name)
        if parked is None:
            return await submitted(self._engine, request)
        restore = wire.RestoreRequest(
            image=parked.image,
            name=parked.id,
            namespace=parked.namespace,
            log_path=parked.log,
            options=request.options,
        )
        return await submitted(self._engine, restore)

    async def Swap(self, request: wire.SwapRequest, context: Any) -> wire.Operation:
        return await submitted(self._engine, request)

    async def GetOperation(self, request: wire.GetOperationRequest, context: Any) -> wire.Operation:
        return operation_message(await self._engine.get(request.id))

    async def ListOperations(self, request: wire.ListOperationsRequest, context: Any) -> wire.ListOperationsResponse:
        found = await self._engine.list(wanted_of(request))
        return wire.ListOperationsResponse(operations=fitting(map(operation_message, found)))

    async def WatchOperation(self, request: wire.GetOperationRequest, context: Any) -> AsyncIterator[wire.Operation]:
        async with aclosing(self._engine.watch(request.id)) as operations:  # type: ignore[type-var]
            async for operation in operations:
                yield operation_message(operation)

    async def CancelOperation(self, request: wire.CancelOperationRequest, context: Any) -> wire.Operation:
        return operation_message(await self._engine.cancel(request.id))
