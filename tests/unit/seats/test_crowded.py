"""Which seats have no room unless another one leaves that works: their requests may go to another host."""

from __future__ import annotations

from kybernate.seats.model import Rules, Seat, Status
from kybernate.seats.plan import Plan
from kybernate.seats.sharing import crowded
from tests.unit.seats.nodes import GIB, NOW, active, seat, state

SHARED = Rules(share_vram=True, reserve_bytes=GIB)


def test_a_seat_is_crowded_by_others_that_work() -> None:
    def is_crowded(*others: Seat, rules: Rules | None = None, need_bytes: int = 0) -> bool:
        mine = seat("mine", need_bytes=need_bytes)
        return crowded(Plan(state(mine, *others, rules=rules), NOW), mine)

    assert not is_crowded()
    assert not is_crowded(active("idle", busy=False))
    assert is_crowded(active("busy"))
    assert not is_crowded(active("elsewhere", 1))
    assert is_crowded(seat("coming", status=Status.WAKING))
    assert not is_crowded(seat("leaving", status=Status.SUSPENDING, busy=True))
    assert not is_crowded(active("busy", need_bytes=40 * GIB), rules=SHARED, need_bytes=30 * GIB)
    assert is_crowded(active("busy", need_bytes=50 * GIB), rules=SHARED, need_bytes=30 * GIB)
    assert not crowded(Plan(state(active("mine"), active("busy", 1)), NOW), active("mine"))
