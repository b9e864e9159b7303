"""Copies that keep images safe: damaged ones are removed and made again, and there are as many as the rules want."""

from __future__ import annotations

from kybernate.store.policy.model import DISK, DURABLE, OBJECT, RAM, ImageState, Priority
from kybernate.store.policy.plan import Plan


def plan_repairs(plan: Plan) -> None:
    """Evict damaged replicas of images that have a good one elsewhere. The others stay: some of it may be readable."""
    for image in list(plan.images.values()):
        for tier in [tier for tier, replica in image.replicas.items() if replica.damaged]:
            left = plan.images[image.key]
            free = not (left.wanted_by or left.copying)
            if free and plan.state.healthy(tier) and plan.good(left):
                plan.evict(left, tier, f"the copy on tier {tier} is damaged, and there is a good one elsewhere")


def plan_persistence(plan: Plan) -> None:
    """Copy images out of memory, and to as many tiers as the rules want, once they have settled.

    A replica on a tier that is not healthy does not count: an image in memory is then copied to another tier.
    """
    for image in sorted(plan.images.values(), key=lambda one: one.created):
        missing = plan.required(image) - len(_durable(plan, image))
        if missing > 0 and _settled(plan, image):
            _persist(plan, image, missing)


def _persist(plan: Plan, image: ImageState, missing: int) -> None:
    wanted = plan.rules_of(image).minimum_copies
    for tier in (DISK, OBJECT):
        if missing and not plan.has(image, tier) and plan.has_room(tier, image.size_bytes, plan.rules.tier(tier).high):
            words = "it is in memory alone" if set(image.replicas) == {RAM} else "it has too few copies"
            plan.copy(plan.images[image.key], tier, Priority.PERSISTENCE, f"{words}; minimum_copies is {wanted}")
            missing -= 1


def _durable(plan: Plan, image: ImageState) -> set[str]:
    """Return the tiers outside of memory that have a replica, or get one."""
    there = {*plan.state.readable(image), *(one.target for one in image.copying)}
    return there & DURABLE


def _settled(plan: Plan, image: ImageState) -> bool:
    """Return whether it can be copied, and is old enough to be worth it: many are deleted within the first seconds."""
    readable = list(plan.state.readable(image))
    age = plan.now - image.created
    return bool(readable) and (age >= plan.rules.persist_after or age < 0)
