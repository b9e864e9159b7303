"""What is copied into memory: images whose use is expected soon, and those that are used again and again."""

from __future__ import annotations

from typing import Final

from kybernate.store.policy.forecast import Expected
from kybernate.store.policy.model import RAM, ImageState, Priority
from kybernate.store.policy.plan import Plan
from kybernate.store.policy.pressure import chosen, leave
from kybernate.store.policy.temperature import weight
from kybernate.store.policy.warmth import Warmth
from kybernate.store.policy.wording import duration

COLDER: Final = 0.9  # of the temperature, and of what is saved in all: more must not be lost for another image
LATELY: Final = 0.5  # uses, each halved for every half-life of its age: one within the last half-life


def plan_prefetch(plan: Plan, warmth: Warmth) -> None:
    """Copy images into memory whose use is expected before a copy that begins later would have ended.

    Colder images leave for them. Nothing leaves without need: there is room for the image afterwards.
    """
    if not plan.state.healthy(RAM):
        return
    wanted = [
        (image, found) for image in warmth.newest() if (found := warmth.expected(image)) and _may_come(plan, image)
    ]
    for image, found in sorted(wanted, key=lambda one: (one[1].at, one[0].key)):
        _prefetch(plan, warmth, image, found)


def _prefetch(plan: Plan, warmth: Warmth, image: ImageState, found: Expected) -> None:
    used = f"its workload is used {found.kind} at {found.clock} ({found.days} of the last {found.of})"
    needed = f"memory is needed for {image.name}, which is expected at {found.clock}"
    _bring(plan, warmth, image, plan.rules.tier(RAM).high, Priority.PREFETCH, used, needed)


def plan_promotion(plan: Plan, warmth: Warmth) -> None:
    """Copy images into memory that were used lately, the warmest first. Colder images leave for them.

    They take room up to the low watermark: what is above it is for new checkpoints. So what has left memory because it
    was above its high watermark does not come back for that reason alone.
    """
    if not plan.state.healthy(RAM):
        return
    wanted = [(warmth.of(image, RAM), image) for image in plan.images.values() if _is_in_use(plan, image)]
    for warm, image in sorted(wanted, key=lambda one: (-one[0], one[1].key)):
        if warm > 0:
            ago = duration(plan.now - max(image.restores))
            used = f"it was used {ago} ago, and {len(image.restores) - 1} times before"
            needed = f"memory is needed for {image.name}, which is warmer"
            _bring(plan, warmth, image, plan.rules.tier(RAM).low, Priority.PROMOTION, used, needed)


def _bring(
    plan: Plan, warmth: Warmth, image: ImageState, limit: float, priority: Priority, reason: str, needed: str
) -> None:
    """Copy an image into memory up to a share of it, or else let colder images leave, if that makes enough room.

    What memory saves in all becomes more each time, so that images do not take turns.
    """
    excess = plan.above(RAM, limit, image.size_bytes)
    if excess <= 0:
        plan.copy(image, RAM, priority, reason)
        return
    limit = COLDER * warmth.of(image, RAM)
    leaving = chosen(plan, warmth, RAM, excess, colder_than=limit)
    lost = sum(one.warmth * one.bytes for one in leaving)
    if sum(one.bytes for one in leaving) >= excess and lost <= limit * image.size_bytes:
        leave(plan, RAM, leaving, needed)
        plan.reserve(RAM, image.size_bytes)


def _may_come(plan: Plan, image: ImageState) -> bool:
    """Return whether an image can be copied into memory, and is not there or on its way."""
    return not plan.has(image, RAM) and not image.copying and any(plan.state.readable(image))


def _is_in_use(plan: Plan, image: ImageState) -> bool:
    return _may_come(plan, image) and weight(image.restores, plan.now, plan.rules.half_life) >= LATELY
