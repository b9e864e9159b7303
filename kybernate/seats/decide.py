"""What to do now about the seats of a node. A pure function of what there is.

What the decisions keep to:

- No two seats are active on one GPU, unless the node shares VRAM and theirs fits, with the reserve.
- Room is claimed when a wake or a start is decided, and room that a suspend makes counts when NVML reports it.
- A seat that cannot be active now, for whatever reason, keeps no other one from its turn for longer than the rules say;
  one that fails keeps none from it.
- Actions of one decision do not rely on each other, so that each may fail. They lead to a state in which nothing is to
  be done until something changes or time passes.
"""

from __future__ import annotations

from typing import Final

from kybernate.seats.memory import plan_relief
from kybernate.seats.model import NEVER, Decision, Refuse, Seat, State, Status, Suspend
from kybernate.seats.order import in_order
from kybernate.seats.outcomes import begun
from kybernate.seats.plan import Plan
from kybernate.seats.sharing import may_share
from kybernate.seats.turns import take_turn

LATE: Final = "its deadline has passed while it waited"


def decide(state: State, now: float) -> Decision:
    """Return what to do now. The order of actions is that of their urgency."""
    refused = [Refuse(seat.name, LATE) for seat in state.waiting.values() if seat.first_deadline <= now]
    for action in refused:
        state = begun(state, action, now)
    plan = Plan(state, now, refused)
    _separate(plan)
    for seat in in_order(plan):
        take_turn(plan, seat)
    _suspend_idle(plan)
    plan_relief(plan)
    return plan.decision()


def _separate(plan: Plan) -> None:
    """Suspend all but one of the seats that are active on one GPU: the highest priority stays, then the longest active.

    They were found so: after a restart, or where a container started without the arbiter. What cannot be suspended now
    is looked at again when it may be.
    """
    active = [one for one in plan.occupying.values() if one.status == Status.ACTIVE]
    kept: list[Seat] = []
    for seat in sorted(active, key=lambda one: (-one.priority, one.since, one.name)):
        other = next((one for one in kept if one.mask & seat.mask and not may_share(plan.rules, one, seat)), None)
        if other is None:
            kept.append(seat)
        elif seat.retry_at > plan.now:
            plan.look(seat.retry_at)
        elif plan.has_ram(seat):
            plan.leave(seat)
            plan.act(Suspend(seat.name, f"{other.name} is active on the same GPU", again=seat.busy))


def _suspend_idle(plan: Plan) -> None:
    """Suspend what has done nothing for long, unless its next use is expected sooner than it would be back."""
    rules, now = plan.rules, plan.now
    if not rules.idle_after:
        return
    for seat in plan.state.occupying.values():
        if seat.status != Status.ACTIVE or seat.busy or seat.lost or seat.name in plan.leaving:
            continue
        at = max(seat.idle_since + rules.idle_after, seat.since + rules.minimum_residency, seat.retry_at)
        if at > now:
            plan.look(at)
        elif seat.expected_use < NEVER and 0 <= seat.expected_use - now <= seat.wake_seconds + seat.suspend_seconds:
            plan.look(seat.expected_use + seat.wake_seconds + seat.suspend_seconds)
        elif plan.has_ram(seat):
            plan.leave(seat)
            plan.act(Suspend(seat.name, f"idle for {now - seat.idle_since:.0f} s"))
