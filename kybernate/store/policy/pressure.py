"""Makes room in tiers: what is coldest leaves first, and only what has a good copy elsewhere, or gets one before."""

from __future__ import annotations

from dataclasses import dataclass

from kybernate.store.policy.model import TIERS, ImageState, Priority, ReplicaState
from kybernate.store.policy.plan import Plan
from kybernate.store.policy.warmth import Warmth
from kybernate.store.policy.wording import share


@dataclass(frozen=True)
class Leaving:
    """An image that may leave a tier: now, after a copy to `target`, or after one that is being `copied` already."""

    image: ImageState
    bytes: int
    warmth: float
    target: str = ""
    copied: bool = False


def plan_relief(plan: Plan, warmth: Warmth) -> None:
    """Bring every tier that is above its high watermark below the low one, as far as images may leave it."""
    for tier in TIERS:
        limits = plan.rules.tier(tier)
        if plan.state.healthy(tier) and plan.tiers[tier].above(limits.high) > 0:
            leaving = chosen(plan, warmth, tier, plan.tiers[tier].above(limits.low))
            leave(plan, tier, leaving, f"tier {tier} is above {share(limits.high)}")


def chosen(plan: Plan, warmth: Warmth, tier: str, excess: float, *, colder_than: float = float("inf")) -> list[Leaving]:
    """Return which images leave a tier so that it has `excess` bytes less, the coldest first; all if it is not enough.

    What the sum does not need stays, the warmest first.
    """
    found: list[Leaving] = []
    freed = 0
    for one in _candidates(plan, warmth, tier):
        if freed >= excess or one.warmth >= colder_than:
            break
        found.append(one)
        freed += one.bytes
    needed = []
    for one in reversed(found):
        if freed - one.bytes >= excess:
            freed -= one.bytes
        else:
            needed.append(one)
    return needed[::-1]


def leave(plan: Plan, tier: str, leaving: list[Leaving], reason: str) -> None:
    """Plan evictions, and copies of what has to be copied before, as far as there is room for these."""
    for one in leaving:
        if one.target:
            if plan.has_room(one.target, one.image.size_bytes, plan.rules.tier(one.target).high):
                words = f"{reason}, and it is among the coldest: it goes to tier {one.target}"
                plan.copy(one.image, one.target, Priority.DEMOTION, words)
        elif not one.copied:
            others = " and ".join(other for other in plan.good(one.image) if other != tier)
            plan.evict(one.image, tier, f"{reason}, and it is among the coldest; tier {others} has it, too")


def _candidates(plan: Plan, warmth: Warmth, tier: str) -> list[Leaving]:
    """Return all that may leave, the coldest first; of equal ones, what was used least recently."""
    there = (_leaving(plan, warmth, tier, image, replica) for image, replica in plan.replicas_in(tier))
    return sorted((one for one in there if one), key=lambda one: (one.warmth, one.image.touched, one.image.key))


def _leaving(plan: Plan, warmth: Warmth, tier: str, image: ImageState, replica: ReplicaState) -> Leaving | None:
    """Return how an image may leave a tier, or None."""
    if plan.is_pinned(image) or image.wanted_by:
        return None
    if image.copying:
        there = any(one.source in (tier, "") and plan.may_evict(image, tier, after=one.target) for one in image.copying)
        busy = any(one.target == tier for one in image.copying)
        return Leaving(image, replica.bytes, warmth.of(image, tier), copied=True) if there and not busy else None
    if plan.may_evict(image, tier):
        return Leaving(image, replica.bytes, warmth.of(image, tier))
    target = plan.lower_with_room(image, tier) if tier in plan.state.readable(image) else None
    if target and plan.may_evict(image, tier, after=target):
        return Leaving(image, replica.bytes, warmth.of(image, tier), target)
    return None
