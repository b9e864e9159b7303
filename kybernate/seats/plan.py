"""The working state of one decision: what the actions that were planned so far have claimed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kybernate.seats.model import (
    NEVER,
    Action,
    Decision,
    Request,
    Seat,
    Start,
    State,
    Status,
    Swap,
    Turn,
    Wake,
)
from kybernate.seats.windows import preferred

MINUTE = 60.0


@dataclass(frozen=True)
class Reservation:
    """GPUs that are kept for a waiting seat. What has left again by `until` may use those that are free."""

    mask: int
    seat: Seat
    until: float


class Plan:
    """Actions, claims and reservations."""

    def __init__(self, state: State, now: float, actions: Iterable[Action] = ()) -> None:
        self.state, self.rules, self.now = state, state.rules, now
        self.preferred = preferred(state.rules.windows, state.rules.zone, now)
        self.occupying: dict[str, Seat] = dict(state.occupying)  # and what is woken by this decision
        self.leaving: set[str] = set()  # what it suspends
        self.parked: set[str] = set()
        self.reservations: list[Reservation] = []
        self.ram_free = state.ram_free_bytes
        self.arena_free = state.arena_free_bytes
        self.actions: list[Action] = list(actions)
        self.turns: dict[str, Turn] = {}
        self._look_at = min((seat.first_deadline for seat in state.waiting.values()), default=NEVER)
        if state.rules.windows:
            self.look((now // MINUTE + 1) * MINUTE)

    def decision(self) -> Decision:
        return Decision(tuple(self.actions), self.turns, self._look_at)

    def look(self, at: float) -> None:
        """Have the next decision made no later than at a time to come."""
        if self.now < at < self._look_at:
            self._look_at = at

    def act(self, action: Action) -> None:
        self.actions.append(action)

    def asked(self, seat: Seat, request: Request) -> Seat:
        """Return a seat that waits because of its state alone."""
        return replace(seat, requests=(request,))

    def wait(self, seat: Seat, reason: str, before: tuple[str, ...] = (), at: float = NEVER) -> None:
        """Note why a seat is not active, and when that may change by time."""
        self.turns[seat.name] = Turn(reason, before, at)
        self.look(at)

    def reserve(self, seat: Seat, until: float | None = None) -> None:
        """Keep a seat's GPUs from those after it; from all of them without a time."""
        self.reservations.append(Reservation(seat.mask, seat, self.now if until is None else until))

    def reserved_before(self, seat: Seat) -> Reservation | None:
        """Return the strictest reservation of its GPUs, None where they are kept for no other seat."""
        found = [one for one in self.reservations if one.mask & seat.mask]
        return min(found, key=lambda one: one.until, default=None)

    def back_by(self, seat: Seat) -> float:
        """Return when a seat that is brought in now may have left again."""
        return self.now + seat.wake_seconds + self.rules.minimum_residency + seat.suspend_seconds

    # ---- claims

    def bring(self, seat: Seat, reason: str) -> None:
        """Start or wake a seat: it claims its room."""
        starts = seat.status == Status.FREE
        self.act(Start(seat.name, reason) if starts else Wake(seat.name, reason))
        self._claim(seat)

    def swap(self, seat: Seat, out: Seat, reason: str) -> None:
        """Suspend one and wake the other in its place."""
        self.leave(out)
        self.act(Swap(seat.name, out.name, reason, again=out.busy))
        self._claim(seat)

    def leave(self, seat: Seat) -> None:
        """Count a seat's memory as moved to the host's. It occupies its GPUs until that has been done."""
        self.leaving.add(seat.name)
        self.ram_free -= seat.ram_bytes

    def _claim(self, seat: Seat) -> None:
        if seat.status == Status.PARKED:  # from the disk, its VRAM comes through host memory
            self.ram_free -= seat.ram_bytes
            self.arena_free -= seat.parked_bytes
        event = "start" if seat.status == Status.FREE else "wake"
        self.occupying[seat.name] = seat.after(event, self.now)

    # ---- room

    def has_ram(self, seat: Seat) -> bool:
        """Return whether a seat's VRAM has room in host memory above the node's low mark."""
        return self.ram_free - seat.ram_bytes >= self.rules.ram_low

    def has_way(self, seat: Seat) -> bool:
        """Return whether a parked seat's VRAM has room on its way from the disk, which leads through the arena."""
        return self.has_ram(seat) and self.arena_free >= seat.parked_bytes

    def lacking(self, seat: Seat) -> tuple[int, int] | None:
        """Return a GPU that has too little free memory for a seat, and how much; None if all have enough.

        What NVML reports as free counts, less what others that are being woken are still to take of it.
        """
        mask, wanted = seat.mask, seat.bytes + self.rules.reserve_bytes
        for gpu in self.state.gpus:
            if mask >> gpu.index & 1 and gpu.free_bytes < wanted + (claimed := self._arriving(1 << gpu.index)):
                return gpu.index, gpu.free_bytes - claimed
        return None

    def _arriving(self, mask: int) -> int:
        return sum(
            max(0, one.need_bytes - one.held_bytes)
            for one in self.occupying.values()
            if one.mask & mask and one.status in (Status.STARTING, Status.WAKING)
        )
