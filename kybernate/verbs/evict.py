"""Evict: an image out of a tier, once another tier was found to have a good copy."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import NoImage
from kybernate.store.movement.moving import evict
from kybernate.store.tiers.tier import Held, Ref, Tier
from kybernate.verbs.model import Observation, Operation, Result, Seen, Target
from kybernate.verbs.node import Movement, Node
from kybernate.verbs.places import between_tiers
from kybernate.verbs.verb import Verb

if TYPE_CHECKING:
    from kybernate.verbs.attempt import Attempt

OBJECT: Final = "object"  # the tier that nodes share


@dataclass(frozen=True)
class Evict(Verb):
    """`tier` is what the image leaves."""

    verb = "evict"
    call = "Checkpoints/EvictImage"
    request = wire.EvictImageRequest

    image: str
    tier: str

    def resolve(self, node: Node, id: str) -> Target:
        return between_tiers(node, self)

    async def execute(self, attempt: Attempt) -> Result:
        ref = ref_of(attempt.operation)
        tier = await movement_of(attempt).tiers.named(self.tier)
        held = await tier.find(ref)
        await remove(attempt, tier, ref)
        return Result(path=held.place, image_id=held.ref.id, bytes=held.bytes)

    async def observe(self, node: Node, operation: Operation) -> Observation:
        return Observation(Seen.ABSENT, "what has been removed is found when it begins again")


async def remove(attempt: Attempt, tier: Tier, ref: Ref) -> None:
    """Remove an image from a tier, if it is there and another one has a good copy."""
    attempt.step("evict")
    movement = movement_of(attempt)
    others = movement.tiers.others(tier.name)
    try:
        held = await tier.find(ref)
    except NoImage:
        return
    await attempt.until_stopped(evict(ref, tier, others))
    await _gone(movement, tier, held)


async def _gone(movement: Movement, tier: Tier, held: Held) -> None:
    if tier.name == OBJECT:
        await asyncio.to_thread(movement.replicas.gone, held)
    else:
        movement.changed(Path(held.place))


def movement_of(attempt: Attempt) -> Movement:
    """Return what moves images on the attempt's node."""
    assert attempt.node.movement is not None, "only a node with tiers resolves it"
    return attempt.node.movement


def ref_of(operation: Operation) -> Ref:
    """Return the image that an operation is about; `resolve` has written it into the target."""
    return Ref(*operation.target.ref)
