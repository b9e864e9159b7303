"""Shortage of host memory: the seats that are used last are parked."""

from __future__ import annotations

from functools import partial

from kybernate.seats.model import IN_RAM, Park, Seat, Status
from kybernate.seats.order import in_order
from kybernate.seats.plan import Plan


def plan_relief(plan: Plan) -> None:
    """Park seats while host memory is below the low mark, until it would be above the high one."""
    if plan.ram_free < plan.rules.ram_low:
        park_coldest(plan, plan.rules.ram_high - plan.rules.ram_low)


def park_coldest(plan: Plan, wanted: int, turn: Seat | None = None, *, arena: int = 0) -> bool:
    """Park the coldest seats until `wanted` bytes above the low mark are free, or will be; False if none can be.

    Of the arena, `arena` bytes are to be free.

    What is being parked counts as free, so that no more is parked than needed. For the `turn` of a seat, others that
    wait are parked, too, whose own turn comes last first: else all of host memory could be theirs, and none be woken.
    """
    coming = sum(one.ram_bytes for one in plan.state.seats.values() if one.status == Status.PARKING)
    coming += sum(plan.state.seats[name].ram_bytes for name in plan.parked)
    lacking = max(wanted + plan.rules.ram_low - plan.ram_free, arena - plan.arena_free) - coming
    idle = sorted((one for one in plan.state.seats.values() if not one.requests), key=_warmth)
    for seat in filter(partial(_may_park, plan), [*idle, *(_behind(plan, turn) if turn is not None else ())]):
        if lacking <= 0:
            break
        plan.parked.add(seat.name)
        plan.act(Park(seat.name, "the coldest, and host memory is short"))
        lacking -= seat.ram_bytes
        coming += seat.ram_bytes
    return coming > 0


def _behind(plan: Plan, turn: Seat) -> list[Seat]:
    """Return the seats that wait, but for `turn` and those for which GPUs are kept, the last first."""
    stays = {turn.name, *(one.seat.name for one in plan.reservations)}
    return [one for one in reversed(in_order(plan)) if one.name not in stays]


def _may_park(plan: Plan, seat: Seat) -> bool:
    if seat.status not in IN_RAM or not seat.parkable or seat.park_at > plan.now or not seat.bytes:
        return False
    return not seat.stands_by_for and seat.name not in plan.occupying and seat.name not in plan.parked


def _warmth(seat: Seat) -> tuple[float, float, str]:
    """Return what sorts seats: the one that is expected last comes first, then the one that is suspended longest."""
    return (-seat.expected_use, seat.since, seat.name)
