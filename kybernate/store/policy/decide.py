"""What to do now about images and suspended containers. A pure function of what there is, and of the rules.

What the decisions keep to:

- An image's last good replica stays. Only `ttl` and `keep_last`, which a user has set, end an image.
- Nothing that is pinned is evicted or deleted; nothing of an image that is being restored or copied.
- Actions of one decision do not rely on each other, so that each may fail.
- They lead to a state in which nothing is to be done: images leave a tier above its high watermark until it is below
  the low one, and are copied to it only where it stays below the high one afterwards.
"""

from __future__ import annotations

from collections import defaultdict

from kybernate.store.policy.model import (
    DISK,
    DURABLE,
    OBJECT,
    RAM,
    TIERS,
    Action,
    ImageState,
    Park,
    Priority,
    Rules,
    State,
    SuspendedState,
    TierState,
)
from kybernate.store.policy.plan import Plan, without
from kybernate.store.policy.pressure import plan_relief
from kybernate.store.policy.promotion import plan_prefetch, plan_promotion
from kybernate.store.policy.warmth import Warmth
from kybernate.store.policy.wording import duration, share


def decide(state: State, rules: Rules) -> tuple[Action, ...]:
    """Return what to do now; nothing once all of it has been done, until something changes or time passes.

    The order of actions is that of their urgency, except that copies have priorities. A copy that is being made
    (`ImageState.copying`) is not planned again.
    """
    plan = Plan(state, rules)
    plan_deletions(plan)
    plan_repairs(plan)
    plan_persistence(plan)
    warmth = Warmth(plan)
    plan_relief(plan, warmth)
    plan_prefetch(plan, warmth)
    plan_promotion(plan, warmth)
    plan_parking(plan)
    return tuple(plan.actions)


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


def plan_parking(plan: Plan) -> None:
    """Park suspended containers by age and for room, the longest idle first, while the disk has room for their images.

    A jump of a clock parks nothing: by age, it has to be trusted.
    """
    rules = plan.rules
    arena = plan.state.arena or TierState()
    crowded = rules.park_high < 1 and arena.above(rules.park_high) > 0
    for one in sorted(plan.state.suspended, key=lambda one: (one.idle_since, one.namespace, one.container)):
        for_room = crowded and arena.above(rules.park_low) > 0
        words = _reason(plan, one, for_room=for_room)
        if words and one.parkable and plan.has_room(DISK, one.bytes, rules.tier(DISK).high):
            plan.actions.append(Park(one.namespace, one.container, words))
            plan.reserve(DISK, one.bytes)
            arena = without(arena, one.bytes)


def _reason(plan: Plan, one: SuspendedState, *, for_room: bool) -> str:
    idle = plan.now - one.idle_since
    after = plan.rules.of(f"{one.namespace}/{one.workload}").park_after
    if after and idle > after and plan.state.clock_trusted:
        return f"it is suspended without use for {duration(idle)}; park_after is {duration(after)}"
    return f"the arena is above {share(plan.rules.park_high)}, and it is among the longest idle" if for_room else ""


def plan_deletions(plan: Plan) -> None:
    """Delete what is too old, or what enough newer images of the workload have replaced.

    Nothing that is pinned, being restored or being copied is deleted, and nothing while a tier that has a replica is
    not healthy: the replica would stay, and come back as an image. Nothing is too old while the clock is not trusted.
    """
    for image in [image for image in plan.images.values() if _may_end(plan, image)]:
        ttl = plan.rules_of(image).ttl
        age = plan.now - image.touched
        if ttl and age > ttl and plan.state.clock_trusted:
            plan.delete(image, f"it was not used for {duration(age)}; its workload's ttl is {duration(ttl)}")
    for image, keep in _replaced(plan):
        if _may_end(plan, image):
            plan.delete(image, f"its workload {image.owner} has {keep} newer images; keep_last is {keep}")


def _may_end(plan: Plan, image: ImageState) -> bool:
    return plan.is_free(image) and all(plan.state.healthy(tier) for tier in image.replicas if tier in TIERS)


def _replaced(plan: Plan) -> list[tuple[ImageState, int]]:
    """Return images with `keep_last` newer ones that are good. Those without a known workload replace nothing."""
    by_owner: dict[str, list[ImageState]] = defaultdict(list)
    for image in plan.images.values():
        if image.workload and plan.rules_of(image).keep_last:
            by_owner[image.owner].append(image)
    return [found for images in by_owner.values() for found in _beyond(plan, images)]


def _beyond(plan: Plan, images: list[ImageState]) -> list[tuple[ImageState, int]]:
    keep = plan.rules_of(images[0]).keep_last
    found, good = [], 0
    for image in sorted(images, key=lambda one: (one.created, one.id), reverse=True):
        if good >= keep:
            found.append((image, keep))
        good += bool(plan.good(image))
    return found
