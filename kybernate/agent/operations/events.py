"""The events of operations, and what operations are called in events, logs and notes."""

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


def title(operation: Operation) -> str:
    """Return what an operation is called, for example "suspend of web (01J…)"."""
    target = operation.target
    return f"{operation.verb} of {target.title or target.image or target.archive} ({operation.id})"


def is_noted(operation: Operation, words: str) -> bool:
    """Return whether what was found of an operation has been noted already."""
    return bool(operation.notes) and operation.notes[-1].endswith(words)


def ordinal(number: int) -> str:
    """Return a number above 1 as in "for the second time"."""
    return {2: "second", 3: "third"}.get(number, f"{number}th")
