"""Carries operations out on this node: each verb by the module that knows it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

from kybernate.agent.operations.attempt import Attempt
from kybernate.agent.operations.executor import Heard
from kybernate.agent.operations.image_verbs import ImageVerbs
from kybernate.agent.operations.model import (
    Arguments,
    Checkpoint,
    Copy,
    Evict,
    Observation,
    Operation,
    Restore,
    Result,
    Resume,
    Suspend,
    Swap,
    Target,
)
from kybernate.agent.operations.resolve import Node, resolve
from kybernate.agent.operations.restores import Restores
from kybernate.agent.operations.shim_verbs import ShimVerbs
from kybernate.agent.operations.tier_verbs import TierVerbs
from kybernate.agent.storage.arrivals import Arrivals
from kybernate.store.policy.model import Priority

OF_SHIMS = (Checkpoint, Suspend, Resume, Swap)
MOST_THREADS = 256  # of the agent's own work; how many operations run is limited elsewhere


class NodeExecutor:
    """The executor of a real node; see Executor. `node.boot` is the boot that the engine was given."""

    def __init__(self, node: Node, tiers: TierVerbs | None = None, arrivals: Arrivals | None = None) -> None:
        self._node = node
        self._tiers = tiers
        self._shims = ShimVerbs(node)
        self._restores = Restores(node, arrivals)
        self._images = ImageVerbs()
        self._threads = ThreadPoolExecutor(MOST_THREADS, "operation")
        self._attempts: dict[str, Attempt] = {}

    async def resolve(self, id: str, arguments: Arguments) -> Target:
        return await asyncio.to_thread(resolve, self._node, id, arguments)

    async def execute(self, operation: Operation, heard: Heard) -> Result:
        attempt = self._attempts[operation.id] = Attempt(operation, heard, self._threads)
        try:
            with self._turn(operation):
                return await self._of(operation).execute(attempt)
        finally:
            attempt.ended.set()
            del self._attempts[operation.id]

    async def cancel(self, operation: Operation) -> None:
        attempt = self._attempts.get(operation.id)
        if attempt is None:
            return  # it has ended
        attempt.stop.set()
        if isinstance(operation.arguments, OF_SHIMS):
            await self._shims.cancel(operation, attempt.ended)
        elif isinstance(operation.arguments, Restore):
            await self._restores.cancel(operation)

    async def observe(self, operation: Operation) -> Observation:
        return await self._of(operation).observe(operation)

    async def roll_back(self, operation: Operation) -> str:
        if isinstance(operation.arguments, Restore):
            return await self._restores.roll_back(operation)
        return await self._images.roll_back(operation)

    def _turn(self, operation: Operation) -> AbstractContextManager[object]:
        """Have transfers between tiers pause while a restore reads its image."""
        if self._tiers is None or not isinstance(operation.arguments, Restore):
            return nullcontext()
        return self._tiers.turns.transfer(Priority.RESTORE)

    def _of(self, operation: Operation) -> ShimVerbs | Restores | ImageVerbs | TierVerbs:
        if isinstance(operation.arguments, OF_SHIMS):
            return self._shims
        if isinstance(operation.arguments, Copy | Evict):
            assert self._tiers is not None, "only an agent with tiers resolves it"
            return self._tiers
        return self._restores if isinstance(operation.arguments, Restore) else self._images
