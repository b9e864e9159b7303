"""Copy and evict: operations that move images between the tiers of this node.

Both may be begun again after a crash: a copy continues with what has arrived, and what is there already is not copied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from kybernate.agent.operations.attempt import Attempt
from kybernate.agent.operations.errors import OperationUndone
from kybernate.agent.operations.model import Copy, Evict, Observation, Operation, Result, Seen
from kybernate.agent.settings import StoreSettings
from kybernate.agent.storage.node_tiers import OBJECT, NodeTiers
from kybernate.agent.storage.replicas import Replicas
from kybernate.node.failure import Failure
from kybernate.store.movement.moving import bring, evict
from kybernate.store.movement.turns import Turns
from kybernate.store.policy.model import Priority
from kybernate.store.tiers.tier import Held, ImageNotInTier, Ref, Tier


class TierVerbs:
    """Carries out what moves images. `changed` gets each directory in which an image appeared or disappeared."""

    def __init__(
        self,
        tiers: NodeTiers,
        turns: Turns,
        replicas: Replicas,
        settings: Callable[[], StoreSettings],
        changed: Callable[[Path], object],
    ) -> None:
        self.turns = turns
        self._tiers, self._replicas = tiers, replicas
        self._settings, self._changed = settings, changed

    async def execute(self, attempt: Attempt) -> Result:
        """See Executor.execute."""
        arguments, ref = attempt.operation.arguments, ref_of(attempt.operation)
        if isinstance(arguments, Copy):
            return await self._copy(attempt, arguments, ref)
        assert isinstance(arguments, Evict)
        return await self._evict(attempt, arguments, ref)

    async def observe(self, operation: Operation) -> Observation:
        """Have it begun again: what has been done is found there."""
        return Observation(Seen.ABSENT, "what has arrived is kept")

    async def _copy(self, attempt: Attempt, wanted: Copy, ref: Ref) -> Result:
        attempt.step("copy")
        target = await self._tiers.named(wanted.tier)
        nodes = await asyncio.to_thread(self._replicas.other_nodes, ref)
        sources = self._tiers.sources(wanted.tier, nodes)
        settings, count = self._settings(), attempt.counted("copy")
        with self.turns.transfer(
            Priority[wanted.priority.upper()],
            parallel=settings.parallel,
            level=settings.compression,
            report=lambda progress: count(progress.done_bytes, progress.total_bytes),
        ) as transfer:
            try:
                limit = settings.bytes_per_second
                work = bring(ref, sources, target, transfer, remote_bytes_per_second=limit)
                held, _ = await attempt.until_stopped(work)
            except OperationUndone:
                await target.discard(ref)
                raise
            except Failure as error:
                error.state = error.state or "no copy was removed, and what has arrived is kept for the next attempt"
                raise
        await self._arrived(target, held)
        for tier in sources if wanted.demote else []:
            if tier.level < target.level:
                await self._remove(attempt, tier, ref)  # not held.ref: a store may know the image by another name
        return Result(path=held.place, image_id=held.ref.id, bytes=transfer.progress.total_bytes)

    async def _evict(self, attempt: Attempt, wanted: Evict, ref: Ref) -> Result:
        tier = await self._tiers.named(wanted.tier)
        held = await tier.find(ref)
        await self._remove(attempt, tier, ref)
        return Result(path=held.place, image_id=held.ref.id, bytes=held.bytes)

    async def _remove(self, attempt: Attempt, tier: Tier, ref: Ref) -> None:
        """Remove an image from a tier, if it is there and another one has a good copy."""
        attempt.step("evict")
        others = self._tiers.others(tier.name)
        try:
            held = await tier.find(ref)
        except ImageNotInTier:
            return
        await attempt.until_stopped(evict(ref, tier, others))
        await self._gone(tier, held)

    async def _arrived(self, tier: Tier, held: Held) -> None:
        if tier.name == OBJECT:
            source = await tier.open(held.ref)
            await asyncio.to_thread(self._replicas.stored, tier.name, held, source.manifest)
            await source.close()
        else:
            self._changed(Path(held.place))

    async def _gone(self, tier: Tier, held: Held) -> None:
        if tier.name == OBJECT:
            await asyncio.to_thread(self._replicas.gone, held)
        else:
            self._changed(Path(held.place))


def ref_of(operation: Operation) -> Ref:
    """Return the image that an operation is about; `resolve` has written it into the target."""
    return Ref(*operation.target.ref)
