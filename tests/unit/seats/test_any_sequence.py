"""The invariant, and the bound on waiting, over any sequence of events: also failures, late answers and restarts.

The world is a node whose GPUs free memory some time after a suspend has ended, and whose actions may fail. What the
arbiter is given is what could be read from the node.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kybernate.seats.decide import decide
from kybernate.seats.matrix import read_matrix
from kybernate.seats.model import (
    NEVER,
    OCCUPYING,
    Gpu,
    Park,
    Refuse,
    Request,
    Rules,
    Seat,
    Start,
    State,
    Status,
    Suspend,
    Swap,
    Wake,
)
from kybernate.seats.outcomes import begun, done, failed, requested
from kybernate.seats.sharing import violations
from kybernate.seats.windows import Window
from tests.unit.seats.nodes import GIB, NOW

TOTAL, RAM = 16 * GIB, 60 * GIB
MASKS = (0b001, 0b001, 0b010, 0b011, 0b100, 0b110, 0b111, 0b010)
CHANGING = frozenset({Status.STARTING, Status.SUSPENDING, Status.PARKING, Status.WAKING})
RULES = {
    "plain": Rules(idle_after=40),
    "short": Rules(maximum_wait=20, minimum_residency=1, slice=5, retries=1),
    "shared": Rules(share_vram=True, reserve_bytes=GIB),
    "matrix": Rules(matrix=read_matrix({"evict_costs": {"s0": 5}, "sets": {"one": "s0 & s2", "two": "s4 | s1 & s7"}})),
    "crowded": Rules(idle_after=40, ram_low=30 * GIB, ram_high=45 * GIB),
    "windows": Rules(windows=(Window(frozenset(range(7)), 8 * 60, 8 * 60 + 2, "inference"),)),
}
numbers = st.integers(0, len(MASKS) - 1)


def eight(of: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(of, min_size=len(MASKS), max_size=len(MASKS))


class Node(RuleBasedStateMachine):
    """A node under one set of rules."""

    def __init__(self, rules: Rules) -> None:
        super().__init__()
        self.rules, self.now = rules, NOW
        self.seats: dict[str, Seat] = {}
        self.sick: set[int] = set()
        self.foreign = [0, 0, 0]  # bytes of processes without a seat
        self.leaving: set[str] = set()  # whose memory NVML still shows

    @initialize(sizes=eight(st.integers(1, 12)), known=eight(st.booleans()))
    def begin(self, sizes: list[int], known: list[bool]) -> None:
        self.sizes = {f"s{number}": size * GIB for number, size in enumerate(sizes)}
        for number, mask in enumerate(MASKS):
            name = f"s{number}"
            self.seats[name] = Seat(
                name,
                "g",
                mask,
                Status.SUSPENDED,
                NOW - 9,
                container=name,
                kind="inference" if number % 2 else "training",
                priority=number // 3,
                need_bytes=self.sizes[name] if known[number] or self.rules == RULES["crowded"] else 0,
                overlaps=number < 3,
                stands_by_for="s0" if number == 1 else "",
            )

    # ---- what can be read

    def state(self) -> State:
        held = {name: self.held(seat) for name, seat in self.seats.items()}
        gpus = []
        for index in range(3):
            taken = sum(held[name] for name, one in self.seats.items() if one.mask >> index & 1)
            free = max(0, TOTAL - self.foreign[index] - taken)
            gpus.append(Gpu(index, TOTAL, free, index not in self.sick))
        seats = [replace(seat, held_bytes=held[name]) for name, seat in self.seats.items()]
        free = RAM - self.in_ram()
        return State.of(gpus, seats, self.rules, free, free - 15 * GIB if self.rules == RULES["crowded"] else free)

    def held(self, seat: Seat) -> int:
        has = seat.status in (Status.ACTIVE, Status.SUSPENDING) or seat.name in self.leaving
        return self.sizes[seat.name] if has else 0

    def in_ram(self) -> int:
        here = (Status.SUSPENDED, Status.FAILED, Status.PARKING, Status.WAKING, Status.SUSPENDING)
        return sum(self.sizes[n] * one.mask.bit_count() for n, one in self.seats.items() if one.status in here)

    def step(self) -> float:
        """Let the arbiter decide, and begin what it says. Return when it wants to look again."""
        state = self.state()
        found = decide(state, self.now)
        for action in found.actions:
            self.check(state, action)
            state = begun(state, action, self.now)
        again = decide(state, self.now)
        assert again.actions == (), f"{found.actions} are followed by {again.actions}"
        self.seats = dict(state.seats)
        return again.look_at

    def check(self, state: State, action: Any) -> None:
        """Room is there before it is taken, as NVML shows it, and each seat does one thing at a time."""
        seat = state.seats[action.seat]
        if isinstance(action, Start | Wake | Swap):
            assert seat.waits or seat.stands_by_for
            assert seat.retry_at <= self.now
        if isinstance(action, Start | Wake):
            for gpu in state.gpus:
                if seat.mask >> gpu.index & 1:
                    assert gpu.healthy
                    assert gpu.free_bytes >= seat.need_bytes + self.rules.reserve_bytes
        if isinstance(action, Suspend):
            assert seat.status == Status.ACTIVE
            assert action.again == seat.busy
        if isinstance(action, Park):
            assert seat.status in (Status.SUSPENDED, Status.FAILED)
            assert seat.park_at <= self.now
        if isinstance(action, Refuse):
            assert any(one.deadline <= self.now for one in seat.requests)

    # ---- what happens

    @rule(numbers=st.lists(numbers, min_size=1, max_size=4), patience=st.sampled_from((NEVER, 3.0, 50.0)))
    def asks(self, numbers: list[int], patience: float) -> None:
        for number in numbers:
            seat = self.seats[f"s{number}"]
            self.seats[seat.name] = requested(seat, Request(self.now, deadline=self.now + patience))
        self.step()

    @rule(rounds=st.integers(1, 6), pauses=st.booleans())
    def all_succeeds(self, rounds: int, pauses: bool) -> None:
        """All that was begun is done, some times over."""
        for _ in range(rounds):
            for name in [name for name, one in self.seats.items() if one.status in CHANGING]:
                if self.seats[name].status in CHANGING:
                    self.end(self.seats[name], well=True)
                    self.step()
            self.now += 6
            for name, seat in self.seats.items():
                self.seats[name] = replace(seat, busy=seat.status == Status.ACTIVE and not pauses)
            self.step()

    @rule(number=numbers, well=st.booleans())
    def ends(self, number: int, well: bool) -> None:
        changing = [one for one in self.seats.values() if one.status in CHANGING]
        if changing:
            self.end(changing[number % len(changing)], well)
            self.step()

    @rule(seconds=st.sampled_from((0.1, 1.0, 7.0, 31.0, 125.0)))
    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.step()

    @rule(number=numbers)
    def works_or_pauses(self, number: int) -> None:
        seat = self.seats[f"s{number}"]
        if seat.status == Status.ACTIVE:
            self.seats[seat.name] = replace(seat, busy=not seat.busy, idle_since=self.now)
            self.step()

    @rule()
    def driver_frees(self) -> None:
        self.leaving.clear()
        self.step()

    @rule(number=numbers)
    def dies(self, number: int) -> None:
        """The container ends: whatever was being done with it ends as well."""
        seat = self.seats[f"s{number}"]
        self.apart(seat)
        free = replace(seat, status=Status.FREE, since=self.now, requests=(), busy=False, partner="", lost=number == 0)
        self.seats[seat.name] = free
        self.leaving.discard(seat.name)
        self.step()

    @rule(number=numbers)
    def starts(self, number: int) -> None:
        seat = self.seats[f"s{number}"]
        if seat.status == Status.FREE and not seat.requests:
            self.seats[seat.name] = requested(replace(seat, lost=False), Request(self.now, "start"))
            self.step()

    @rule()
    def restarts(self) -> None:
        """The agent is new: it knows what driver and shims report, and none of what was asked and had failed."""
        for name, seat in self.seats.items():
            self.seats[name] = replace(seat, requests=(), asked_at=0.0, failures=0, retry_at=0.0, park_at=0.0)
        self.step()

    @rule(index=st.integers(0, 2))
    def falls_sick_or_recovers(self, index: int) -> None:
        self.sick ^= {index}
        self.step()

    @precondition(lambda self: all(one.status not in OCCUPYING for one in self.seats.values()))
    @rule(index=st.integers(0, 2), size=st.integers(0, 14))
    def another_process_takes(self, index: int, size: int) -> None:
        self.foreign[index] = size * GIB
        self.step()

    @rule(number=numbers)
    def is_lost_or_found(self, number: int) -> None:
        seat = self.seats["s0"]
        self.seats["s0"] = replace(seat, lost=not seat.lost)
        self.step()

    def apart(self, seat: Seat) -> None:
        """End the other side's part in a swap, which has failed."""
        if seat.partner and (other := self.seats[seat.partner]).partner == seat.name:
            self.seats[other.name] = self.ended(replace(other, partner=""), well=other.status == Status.SUSPENDING)

    def end(self, seat: Seat, well: bool) -> None:
        if seat.partner and not (well and seat.status == Status.SUSPENDING):
            other = self.seats[seat.partner]
            if other.partner == seat.name and other.status == Status.SUSPENDING and well:
                self.seats[other.name] = self.ended(other, well=True)  # the other side ends first
            else:
                self.apart(seat)
        self.seats[seat.name] = self.ended(seat, well)

    def ended(self, seat: Seat, well: bool) -> Seat:
        if not well:
            return failed(seat, self.now, self.rules)
        if seat.status == Status.SUSPENDING:
            self.leaving.add(seat.name)
        size = self.sizes[seat.name]
        parked = size * seat.mask.bit_count() if seat.status == Status.PARKING else 0
        return done(replace(seat, need_bytes=size, parked_bytes=parked), self.now)

    # ---- what holds

    @invariant()
    def no_two_are_active_where_they_may_not(self) -> None:
        if not self.seats:
            return
        state = self.state()
        assert list(violations(state)) == []
        matrix = self.rules.matrix
        present = [one for one in self.seats.values() if one.occupies and not self.is_swapped_out(one)]
        assert matrix is None or matrix.allows([one.container for one in present])

    def is_swapped_out(self, seat: Seat) -> bool:
        return bool(seat.partner) and seat.status == Status.SUSPENDING

    def teardown(self) -> None:
        """Whatever has happened: once actions succeed, each seat that waits gets its turn, also behind busy ones."""
        if not self.seats:
            return
        self.sick.clear()
        self.foreign = [0, 0, 0]
        self.sizes = {name: min(size, 4 * GIB) for name, size in self.sizes.items()}
        for name, seat in self.seats.items():
            self.seats[name] = replace(
                seat, lost=False, need_bytes=min(seat.need_bytes, self.sizes[name]), busy=seat.status == Status.ACTIVE
            )
        wanted = {name for name, one in self.seats.items() if one.waits and one.requests[-1].deadline == NEVER}
        end = self.now + 3 * self.rules.maximum_wait + 2 * len(self.seats) * self.rules.slice
        while wanted and self.now < end:
            look_at = self.step()
            for seat in [one for one in self.seats.values() if one.status in CHANGING]:
                if self.seats[seat.name].status in CHANGING:
                    self.end(self.seats[seat.name], well=True)
                    self.now += 0.1
            self.leaving.clear()
            for name, seat in self.seats.items():
                self.seats[name] = replace(seat, busy=seat.status == Status.ACTIVE)
            wanted -= {name for name, one in self.seats.items() if one.status == Status.ACTIVE}
            self.now = max(self.now + 0.1, min(look_at, self.now + 30))
        assert not wanted, {name: (self.seats[name], decide(self.state(), self.now).turns.get(name)) for name in wanted}


@pytest.mark.parametrize("name", RULES)
def test_no_sequence_of_events_breaks_the_invariant(name: str) -> None:
    case = type("Case", (Node,), {"__init__": lambda self: Node.__init__(self, RULES[name])}).TestCase
    case.settings = settings(
        max_examples=10, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case("runTest").runTest()
