"""Carries operations out on this node: whatever the verb, by the verb itself."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from kybernate.agent.operations.executor import Heard
from kybernate.verbs.attempt import Attempt
from kybernate.verbs.every import VERBS
from kybernate.verbs.model import Arguments, Observation, Operation, Result, Target
from kybernate.verbs.node import Node
from kybernate.verbs.verb import Verb

MOST_THREADS = 256  # of the agent's own work; how many operations run is limited elsewhere


class NodeExecutor:
    """The executor of a real node; see Executor. `node.boot` is the boot that the engine was given."""

    verbs: Mapping[str, type[Arguments]] = VERBS

    def __init__(self, node: Node) -> None:
        self._node = node
        self._threads = ThreadPoolExecutor(MOST_THREADS, "operation")
        self._attempts: dict[str, Attempt] = {}

    async def meant(self, arguments: Arguments) -> Arguments:
        return await asyncio.to_thread(cast(Verb, arguments).meant, self._node)

    async def resolve(self, id: str, arguments: Arguments) -> Target:
        return await asyncio.to_thread(cast(Verb, arguments).resolve, self._node, id)

    async def execute(self, operation: Operation, heard: Heard) -> Result:
        attempt = self._attempts[operation.id] = Attempt(operation, self._node, heard, self._threads)
        try:
            return await _verb(operation).execute(attempt)
        finally:
            attempt.ended.set()
            del self._attempts[operation.id]

    async def cancel(self, operation: Operation) -> None:
        attempt = self._attempts.get(operation.id)
        if attempt is None:
            return  # it has ended
        attempt.stop.set()
        await _verb(operation).cancel(self._node, operation, attempt.ended)

    async def observe(self, operation: Operation) -> Observation:
        return await _verb(operation).observe(self._node, operation)

    async def roll_back(self, operation: Operation) -> str:
        return await _verb(operation).roll_back(self._node, operation)


def _verb(operation: Operation) -> Verb:
    return cast(Verb, operation.arguments)
