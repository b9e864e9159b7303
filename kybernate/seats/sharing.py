"""Which active seats are in the way of a waiting one: those on its GPUs; where VRAM is shared, the cheapest of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kybernate.seats.model import Request, Rules, Seat, State, Status
from kybernate.seats.order import leaves_at
from kybernate.seats.plan import Plan


def in_the_way(plan: Plan, seat: Seat) -> list[Seat]:
    """Return the seats that must have left before a seat may be brought in."""
    rules, mask = plan.rules, seat.mask
    on_its_gpus = [one for one in plan.occupying.values() if one.mask & mask]
    if rules.share_vram:
        sharing = [one for one in on_its_gpus if may_share(rules, one, seat)]
        found = [one for one in on_its_gpus if not may_share(rules, one, seat)]
        found += _overcommitted(plan, seat, sharing)
    else:
        found = on_its_gpus
    if rules.matrix is not None:
        found += _excluded(plan, seat, found)
    return found


def crowded(plan: Plan, seat: Seat) -> bool:
    """Return whether a seat could be active only if another one left that works, or is on its way in to do so."""
    if seat.occupies or not any(map(_stays, plan.occupying.values())):
        return False
    waiting = seat if seat.requests else plan.asked(seat, Request(plan.now, "request"))
    return any(map(_stays, in_the_way(plan, waiting)))


def _stays(one: Seat) -> bool:
    """Return whether an active seat works, or is on its way in to do so."""
    return one.status != Status.SUSPENDING and (one.busy or one.status != Status.ACTIVE)


def may_share(rules: Rules, one: Seat, other: Seat) -> bool:
    """Return whether two seats may be active on the same GPU, as long as their memory fits."""
    return rules.share_vram and one.may_share and other.may_share and bool(one.bytes) and bool(other.bytes)


def violations(state: State) -> Iterator[str]:
    """Yield what breaks the invariant: seats that are active on one GPU and may not be. A swap's two sides may."""
    present = [seat for seat in state.seats.values() if seat.occupies]
    for number, one in enumerate(present):
        for other in present[number + 1 :]:
            if one.mask & other.mask and one.partner != other.name and not may_share(state.rules, one, other):
                yield f"{one.name} ({one.status}) and {other.name} ({other.status}) are on the same GPU"
    present = [seat for seat in present if not (seat.partner and seat.status == Status.SUSPENDING)]
    for gpu in state.gpus if state.rules.share_vram else ():
        sharing = [one for one in present if one.mask >> gpu.index & 1]
        taken = sum(one.bytes for one in sharing) + state.rules.reserve_bytes
        if len(sharing) > 1 and taken > gpu.total_bytes:
            yield f"the seats on GPU {gpu.index} need {taken} bytes of {gpu.total_bytes}"


def _overcommitted(plan: Plan, seat: Seat, sharing: list[Seat]) -> list[Seat]:
    """Return which of the seats that share VRAM must leave, so that all of it fits: first what costs least."""
    over = {
        gpu.index: excess
        for gpu in plan.state.gpus
        if seat.mask >> gpu.index & 1 and (excess := _excess(plan.rules, gpu.total_bytes, gpu.index, seat, sharing)) > 0
    }
    if not over:
        return []
    now = plan.now

    def readiness(one: Seat) -> tuple[int, float, float, str]:
        if one.status == Status.SUSPENDING or one.name in plan.leaving:
            return (0, 0.0, 0.0, one.name)
        if one.status != Status.ACTIVE:  # it is on its way in
            return (2, 0.0, 0.0, one.name)
        at = max(now, leaves_at(plan, one, seat))
        return (1, at, cost_of_eviction(plan.rules, one, now), one.name)

    chosen: list[Seat] = []
    for one in sorted(sharing, key=readiness):
        if not over:
            break
        if any(one.mask >> index & 1 for index in over):
            chosen.append(one)
            over = {index: left for index, excess in over.items() if (left := excess - _on(one, index)) > 0}
    return list(_needed(plan, seat, sharing, chosen))


def _needed(plan: Plan, seat: Seat, sharing: list[Seat], chosen: list[Seat]) -> Iterable[Seat]:
    """Leave out what a later choice has made unnecessary."""
    totals = {gpu.index: gpu.total_bytes for gpu in plan.state.gpus if seat.mask >> gpu.index & 1}
    kept = {one.name: one for one in chosen}
    for one in chosen:
        rest = [other for other in sharing if other.name not in kept or other.name == one.name]
        if all(_excess(plan.rules, total, index, seat, rest) <= 0 for index, total in totals.items()):
            del kept[one.name]
    return kept.values()


def cost_of_eviction(rules: Rules, seat: Seat, now: float) -> float:
    """Return the seconds that an eviction is expected to cost, for each second until the next use."""
    cost = rules.matrix.cost(seat.container) if rules.matrix is not None else 1
    return cost * (seat.wake_seconds + seat.suspend_seconds) / max(1.0, seat.expected_use - now)


def _excess(rules: Rules, total: int, index: int, seat: Seat, sharing: Iterable[Seat]) -> int:
    return sum(_on(one, index) for one in sharing) + seat.bytes + rules.reserve_bytes - total


def _on(seat: Seat, index: int) -> int:
    return seat.bytes if seat.mask >> index & 1 else 0


def _excluded(plan: Plan, seat: Seat, found: list[Seat]) -> list[Seat]:
    """Return the seats of other GPUs, or that share, which the matrix does not let be active with this one."""
    matrix = plan.rules.matrix
    assert matrix is not None
    names = {one.name for one in found}
    left = [one for one in plan.occupying.values() if one.name not in names]
    out = matrix.to_evict(seat.container, [one.container for one in left])
    return [one for one in left if one.container in out]
