"""Suspended containers that are parked: those that were idle for long, and the longest idle where the arena is full."""

from __future__ import annotations

from kybernate.store.policy.model import DISK, Park, SuspendedState, TierState
from kybernate.store.policy.plan import Plan, without
from kybernate.store.policy.wording import duration, share


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
