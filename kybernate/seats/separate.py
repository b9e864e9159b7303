"""What was found active together and may not be: after a restart, or where a container started without the arbiter."""

from __future__ import annotations

from kybernate.seats.model import Seat, Status, Suspend
from kybernate.seats.plan import Plan
from kybernate.seats.sharing import may_share


def separate(plan: Plan) -> None:
    """Suspend all but one of the seats that are active on one GPU: the highest priority stays, then the longest active.

    What cannot be suspended now is looked at again when it may be.
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
