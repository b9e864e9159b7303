"""The turn of one waiting seat: it is brought in, or room is made for it, or it waits, with the reason."""

from __future__ import annotations

from kybernate.seats.memory import park_coldest
from kybernate.seats.model import NEVER, Seat, Status, Suspend, Turn
from kybernate.seats.order import is_urgent, leaves_at, rank
from kybernate.seats.plan import Plan
from kybernate.seats.sharing import in_the_way

GIB = 1 << 30


def take_turn(plan: Plan, seat: Seat) -> None:
    """Decide about one waiting seat; those before it have been decided."""
    if seat.retry_at > plan.now:
        plan.wait(seat, f"it failed {seat.failures} times, and is tried again", at=seat.retry_at)
        return
    if seat.name in plan.parked:
        plan.wait(seat, "it is being parked: a seat before it needs the host memory")
        return
    if refused := _impossible(plan, seat):
        plan.wait(seat, refused)
        return
    kept = plan.reserved_before(seat)
    may_pass = kept is None or plan.back_by(seat) <= kept.until
    blockers = in_the_way(plan, seat) if may_pass else []
    if kept and (blockers or not may_pass):
        first = kept.seat
        turn = plan.turns.get(first.name)
        at = (turn.at if turn and turn.at < NEVER else plan.now) + first.wake_seconds + plan.rules.slice
        plan.turns[seat.name] = Turn(f"{first.name} is before it", (first.name,), at)
    elif blockers:
        _make_room(plan, seat, blockers)
    elif lacking := plan.lacking(seat):
        _wait_for_memory(plan, seat, *lacking)
    elif (
        seat.status == Status.PARKED
        and not plan.has_way(seat)
        and park_coldest(plan, seat.ram_bytes, seat, arena=seat.parked_bytes)
    ):
        plan.wait(seat, "host memory has no room for its VRAM on its way to the GPU")
        plan.reserve(seat)
    else:
        plan.bring(seat, _cause(seat))


def _impossible(plan: Plan, seat: Seat) -> str:
    """Return why a seat cannot be brought in whatever leaves; it keeps no other from its turn."""
    for gpu in plan.state.gpus:
        if seat.mask >> gpu.index & 1:
            if not gpu.healthy:
                return f"GPU {gpu.index} is not healthy"
            if seat.bytes + plan.rules.reserve_bytes > gpu.total_bytes:
                return (
                    f"it needs {seat.bytes / GIB:.1f} GiB of GPU {gpu.index}, which has {gpu.total_bytes / GIB:.1f} GiB"
                    f" with a reserve of {plan.rules.reserve_bytes / GIB:.1f} GiB"
                )
    return ""


def _make_room(plan: Plan, seat: Seat, blockers: list[Seat]) -> None:
    """Suspend what is in the way, if all of it may leave now; else wait for it."""
    now = plan.now
    names = tuple(one.name for one in blockers)
    leaving = [one for one in blockers if one.status == Status.SUSPENDING or one.name in plan.leaving]
    active = [one for one in blockers if one.status == Status.ACTIVE and one.name not in plan.leaving]
    coming = [one for one in blockers if one.status in (Status.STARTING, Status.WAKING)]
    at = max((leaves_at(plan, one, seat) for one in active), default=now)
    if coming:
        back = max(one.since + one.wake_seconds for one in coming) + plan.rules.minimum_residency
        plan.wait(seat, "what is in its way is being started or woken", names, max(at, back))
        _keep(plan, seat, max(at, back))
    elif at > now:
        if failing := [one.name for one in active if one.retry_at > now]:  # its GPUs are kept for no seat meanwhile
            plan.wait(seat, f"the suspend of {', '.join(failing)} failed, and is tried again", names, at)
        else:
            plan.wait(seat, "what is in its way has its turn", names, at)
            _keep(plan, seat, at)
    elif active and not all(map(plan.has_ram, active)):
        plan.wait(seat, "host memory has no room for what is in its way", names)
        if park_coldest(plan, sum(one.ram_bytes for one in active), seat):
            plan.reserve(seat)
    elif _may_swap(seat, blockers, active):
        plan.swap(seat, active[0], _cause(seat))
    else:
        for one in active:
            plan.leave(one)
            plan.act(Suspend(one.name, _why(plan, one, seat), again=one.busy))
        done = max((one.since if one in leaving else now) + one.suspend_seconds for one in blockers)
        plan.wait(seat, "room is being made for it", names, done)
        plan.reserve(seat)


def _keep(plan: Plan, seat: Seat, until: float) -> None:
    """Keep its GPUs for a seat: from all once it has waited too long, before that from what would be in its way."""
    overdue = seat.waits_since + plan.rules.maximum_wait <= plan.now
    plan.reserve(seat, None if overdue or is_urgent(plan, seat) else until)


def _may_swap(seat: Seat, blockers: list[Seat], active: list[Seat]) -> bool:
    if not (len(active) == len(blockers) == 1 and seat.status == Status.SUSPENDED):
        return False
    return seat.overlaps and active[0].overlaps and seat.mask == active[0].mask and not active[0].lost


def _wait_for_memory(plan: Plan, seat: Seat, gpu: int, free: int) -> None:
    """Wait until NVML reports room. It is kept for the seat if it is one of the seats that still holds it."""
    held = [
        one.name for one in plan.state.seats.values() if one.mask >> gpu & 1 and one.held_bytes and not one.occupies
    ]
    text = f"GPU {gpu} has {max(0, free) / GIB:.1f} GiB free, and it needs {seat.bytes / GIB:.1f} GiB and the reserve"
    if held:
        plan.wait(seat, f"{text}; memory of suspended seats is not free yet", tuple(held))
        plan.reserve(seat)
    else:
        plan.wait(seat, f"{text}; processes without a seat hold the rest")


def _cause(seat: Seat) -> str:
    return f"requested by {seat.requests[0].cause}"


def _why(plan: Plan, seat: Seat, waiting: Seat) -> str:
    if is_urgent(plan, waiting):
        return f"{waiting.name} takes the place of {waiting.stands_by_for}"
    if rank(plan, waiting) > rank(plan, seat):
        return f"{waiting.name} has a higher priority"
    if not seat.busy:
        return f"{waiting.name} waits, and it is idle"
    if waiting.waits_since + plan.rules.maximum_wait <= plan.now:
        return f"{waiting.name} has waited for {plan.now - waiting.waits_since:.0f} s"
    return f"its time slice is over, and {waiting.name} waits"
