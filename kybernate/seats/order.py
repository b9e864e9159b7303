"""In which order waiting seats get their turn, and when an active one has to leave for a waiting one."""

from __future__ import annotations

from collections.abc import Iterator

from kybernate.seats.model import WAKEABLE, Request, Seat, Status
from kybernate.seats.plan import Plan

Rank = tuple[bool, int]


def in_order(plan: Plan) -> list[Seat]:
    """Return the seats that wait: standbys of lost seats, those that waited too long, then by rank and time."""
    found = [*_standbys(plan), *plan.state.waiting.values()]
    maximum = plan.rules.maximum_wait

    def place(seat: Seat) -> tuple[bool, bool, float, int, float, str]:
        preferred, priority = rank(plan, seat)
        since = seat.waits_since
        if is_urgent(plan, seat):
            return (False, False, 0.0, 0, since, seat.name)
        if since + maximum <= plan.now:
            return (True, False, since, 0, since, seat.name)
        plan.look(since + maximum)
        return (True, True, 0.0 if preferred else 1.0, -priority, since, seat.name)

    return sorted(found, key=place)


def rank(plan: Plan, seat: Seat) -> Rank:
    """Return what preempts: the window's kind, then the class of priority."""
    return (bool(plan.preferred) and seat.kind == plan.preferred, seat.priority)


def is_urgent(plan: Plan, seat: Seat) -> bool:
    """Return whether it takes the place of a lost one."""
    primary = plan.state.seats.get(seat.stands_by_for) if seat.stands_by_for else None
    return primary is not None and primary.lost


def leaves_at(plan: Plan, seat: Seat, waiting: Seat) -> float:
    """Return when an active seat has to leave for a waiting one, as far as time alone decides that."""
    rules = plan.rules
    if is_urgent(plan, waiting):
        return max(plan.now, seat.retry_at)
    mine, other = rank(plan, seat), rank(plan, waiting)
    earliest = seat.since + rules.minimum_residency
    times = [waiting.waits_since + rules.maximum_wait]
    if other > mine:
        times.append(earliest)
    if not seat.busy:
        paused = seat.idle_since + rules.yield_after
        if seat.idle_since > seat.since:  # it has worked, so that it has had its time
            earliest = min(earliest, paused)
        times.append(paused)
    if other == mine:
        came_later = seat.asked_at > waiting.waits_since
        times.append(earliest if came_later else seat.since + rules.slice)
    return max(earliest, seat.retry_at, min(times))


def _standbys(plan: Plan) -> Iterator[Seat]:
    """Yield those that have no request of their own, and take the place of a lost seat."""
    for name in plan.state.standbys:
        seat = plan.state.seats[name]
        if not seat.requests and seat.status in WAKEABLE - {Status.FREE} and is_urgent(plan, seat):
            yield plan.asked(seat, Request(plan.now, "standby"))
