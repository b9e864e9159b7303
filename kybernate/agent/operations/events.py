"""The events of operations: what the engine has recorded."""

from __future__ import annotations

from typing import Protocol

from kybernate.agent.operations.attendance import LOG
from kybernate.node.failure import Failure
from kybernate.verbs.model import Operation


class Events(Protocol):
    """Where the engine says what happened; agent/events/log.py."""

    async def record(
        self,
        type: str,
        level: str,
        message: str,
        *,
        container: str = "",
        namespace: str = "",
        operation: str = "",
        image: str = "",
        **fields: str,
    ) -> object: ...


class OperationEvents:
    """Records events of operations; that one cannot be recorded does not concern its operation."""

    def __init__(self, events: Events) -> None:
        self._events = events

    async def record(self, type: str, level: str, operation: Operation, message: str) -> None:
        target = operation.target
        try:
            await self._events.record(
                type,
                level,
                message,
                container=target.container,
                namespace=target.namespace,
                operation=operation.id,
                image=target.image,
                verb=operation.verb,
                error=operation.fault.message if operation.fault else "",
            )
        except Failure as error:
            LOG.error("the event %s of operation %s could not be recorded: %s", type, operation.id, error)
