"""Copy: an image into a tier of this node, from wherever it is whole; a demotion also evicts it from the faster ones.

It may be begun again after a crash: a copy continues with what has arrived, and what is there already is not copied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Failure
from kybernate.store.movement.moving import bring
from kybernate.store.policy.model import Priority
from kybernate.store.tiers.tier import Held, Tier
from kybernate.verbs.errors import OperationUndone
from kybernate.verbs.evict import OBJECT, movement_of, ref_of, remove
from kybernate.verbs.model import Observation, Operation, Result, Seen, Target
from kybernate.verbs.node import Movement, Node
from kybernate.verbs.places import between_tiers
from kybernate.verbs.verb import Verb

if TYPE_CHECKING:
    from kybernate.verbs.attempt import Attempt

PRIORITIES = ("restore", "request", "prefetch", "demotion")


@dataclass(frozen=True)
class Copy(Verb):
    """`tier` is where the image is to be; `demote`: and no longer in the tiers that are faster.

    `priority` is one of PRIORITIES, by which transfers of one node let each other pass.
    """

    verb = "copy"
    call = "Checkpoints/CopyImage"
    request = wire.CopyImageRequest

    image: str
    tier: str
    priority: str = "request"
    demote: bool = False

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.priority not in PRIORITIES:
            yield "priority", f"is none of {', '.join(PRIORITIES)}"

    def resolve(self, node: Node, id: str) -> Target:
        return between_tiers(node, self)

    async def execute(self, attempt: Attempt) -> Result:
        attempt.step("copy")
        movement, ref = movement_of(attempt), ref_of(attempt.operation)
        target = await movement.tiers.named(self.tier)
        nodes = await asyncio.to_thread(movement.replicas.other_nodes, ref)
        sources = movement.tiers.sources(self.tier, nodes)
        limits, count = movement.limits(), attempt.counted("copy")
        with movement.turns.transfer(
            Priority[self.priority.upper()],
            parallel=limits.parallel,
            level=limits.compression,
            report=lambda progress: count(progress.done_bytes, progress.total_bytes),
        ) as transfer:
            try:
                work = bring(ref, sources, target, transfer, remote_bytes_per_second=limits.bytes_per_second)
                held, _ = await attempt.until_stopped(work)
            except OperationUndone:
                await target.discard(ref)
                raise
            except Failure as error:
                error.state = error.state or "no copy was removed, and what has arrived is kept for the next attempt"
                raise
        await _arrived(movement, target, held)
        for tier in sources if self.demote else []:
            if tier.level < target.level:
                await remove(attempt, tier, ref)  # not held.ref: a store may know the image by another name
        return Result(path=held.place, image_id=held.ref.id, bytes=transfer.progress.total_bytes)

    async def observe(self, node: Node, operation: Operation) -> Observation:
        return Observation(Seen.ABSENT, "what has arrived is kept")


async def _arrived(movement: Movement, tier: Tier, held: Held) -> None:
    if tier.name == OBJECT:
        source = await tier.open(held.ref)
        await asyncio.to_thread(movement.replicas.stored, tier.name, held, source.manifest)
        await source.close()
    else:
        movement.changed(Path(held.place))
