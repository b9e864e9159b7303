"""What the arbiter knows of a node, and what it may do. Times are seconds since 1970 (UTC), sizes bytes.

A *seat* is a claim on a group of GPUs. What has a seat is a container; a seat without one is free. GPUs are bits of a
mask, so that two seats compete where `a.mask & b.mask`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, tzinfo
from enum import StrEnum
from typing import Final

from kybernate.seats.matrix import Matrix
from kybernate.seats.windows import Window

NEVER: Final = float("inf")


class Status(StrEnum):
    """What a seat is. The moves between them are those of MOVES."""

    FREE = "free"  # no container has it, or one that waits at its start
    STARTING = "starting"  # the container's start was let through
    ACTIVE = "active"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"  # its VRAM is in host memory
    PARKING = "parking"
    PARKED = "parked"  # its VRAM is below host memory
    WAKING = "waking"
    FAILED = "failed"  # it could not be woken as often as the rules allow; a new request tries again


MOVES: Final[Mapping[Status, Mapping[str, Status]]] = {
    Status.FREE: {"start": Status.STARTING},
    Status.STARTING: {"done": Status.ACTIVE, "failed": Status.FREE},
    Status.ACTIVE: {"suspend": Status.SUSPENDING},
    Status.SUSPENDING: {"done": Status.SUSPENDED, "failed": Status.ACTIVE},
    Status.SUSPENDED: {"wake": Status.WAKING, "park": Status.PARKING},
    Status.PARKING: {"done": Status.PARKED, "failed": Status.SUSPENDED},
    Status.PARKED: {"wake": Status.WAKING},
    Status.WAKING: {"done": Status.ACTIVE, "failed": Status.SUSPENDED},
    Status.FAILED: {"wake": Status.WAKING, "park": Status.PARKING},
}
OCCUPYING: Final = frozenset({Status.STARTING, Status.ACTIVE, Status.SUSPENDING, Status.WAKING})
WAKEABLE: Final = frozenset({Status.FREE, Status.SUSPENDED, Status.PARKED, Status.FAILED})
TURNS: Final = frozenset({Status.FREE, Status.STARTING, Status.ACTIVE})  # what begins with CUDA then, is let in
IN_RAM: Final = frozenset({Status.SUSPENDED, Status.FAILED})


@dataclass(frozen=True)
class Gpu:
    """A GPU. `free_bytes` is what NVML reports now, which decides; a sum of what seats take does not."""

    index: int
    total_bytes: int
    free_bytes: int
    healthy: bool = True


@dataclass(frozen=True)
class Request:
    """A wish that a seat be active. `cause` is where it came from: api, use, start, annotation, preempted, …"""

    at: float
    cause: str = "api"
    deadline: float = NEVER


@dataclass(frozen=True)
class Seat:
    """A seat, and the container that has it. Bytes are those on each of its GPUs.

    `need_bytes` was learned from its last time in VRAM, or is declared; 0 is not known. `held_bytes` is what NVML
    reports that its processes hold. `busy` says that it computes, has an open request or work in the driver's queue;
    `idle_since` is when that ended. `asked_at` is when it asked for the time in VRAM that it has, `expected_use` the
    forecast. `wake_seconds` and `suspend_seconds` were measured. `retry_at` is when a change that failed may be
    tried again, but for a park, for which `park_at` is. `parkable` says that its VRAM in host memory can be parked,
    `parked_bytes` how much is. A `lost` seat is taken over by the one that `stands_by_for` it. `partner` is the other
    side of its swap. `requests` are open, the oldest first; a seat that is active has none.
    """

    name: str
    group: str
    mask: int
    status: Status = Status.FREE
    since: float = 0.0
    container: str = ""
    kind: str = ""
    priority: int = 0
    need_bytes: int = 0
    held_bytes: int = 0
    may_share: bool = True
    parkable: bool = True
    parked_bytes: int = 0
    overlaps: bool = False
    busy: bool = False
    idle_since: float = 0.0
    asked_at: float = 0.0
    expected_use: float = NEVER
    wake_seconds: float = 1.0
    suspend_seconds: float = 1.0
    failures: int = 0
    retry_at: float = 0.0
    park_at: float = 0.0
    lost: bool = False
    stands_by_for: str = ""
    partner: str = ""
    requests: tuple[Request, ...] = ()

    @property
    def occupies(self) -> bool:
        return self.status in OCCUPYING

    @property
    def is_its_turn(self) -> bool:
        """Return whether a program of its container may begin with CUDA; in a swap, once the other side has left."""
        return self.status in TURNS

    @property
    def waits(self) -> bool:
        return bool(self.requests) and self.status in WAKEABLE

    @property
    def waits_since(self) -> float:
        return self.requests[0].at

    @property
    def first_deadline(self) -> float:
        return min((one.deadline for one in self.requests), default=NEVER)

    @property
    def bytes(self) -> int:
        """What it takes, or would take, of each GPU, as far as that is known."""
        return max(self.need_bytes, self.held_bytes)

    @property
    def ram_bytes(self) -> int:
        """The host memory that its VRAM takes: that of all of its GPUs."""
        return self.bytes * self.mask.bit_count()

    def after(self, event: str, now: float) -> Seat:
        """Return the seat after an event of MOVES. Raises KeyError where its status has no such event."""
        return replace(self, status=MOVES[self.status][event], since=now)


@dataclass(frozen=True)
class Rules:
    """The configuration's figures. Seconds, but for shares and bytes.

    `maximum_wait` is when a waiting seat comes before all priorities; `minimum_residency` how long a seat is active at
    least; `slice` how long while others of its priority wait. `yield_after` is the pause in its work
    after which a seat makes room for a waiting one, `idle_after` (0: never) the one after which it does for none.
    `retries` is how often a wake that failed is tried again, after `backoff` and twice as long each time, up to
    `backoff_limit`. `reserve_bytes` stay free on every GPU, `ram_low` and `ram_high` bytes are free host memory: below
    the former seats are parked until it is above the latter.
    """

    share_vram: bool = False
    reserve_bytes: int = 512 << 20
    maximum_wait: float = 120.0
    minimum_residency: float = 5.0
    slice: float = 30.0
    yield_after: float = 0.5
    idle_after: float = 300.0
    retries: int = 5
    backoff: float = 2.0
    backoff_limit: float = 60.0
    ram_low: int = 4 << 30
    ram_high: int = 8 << 30
    matrix: Matrix | None = None
    windows: tuple[Window, ...] = ()
    zone: tzinfo = UTC


@dataclass(frozen=True)
class State:
    """All that a decision depends on. `ram_free_bytes` is host memory that is free, and that no suspend is to take.
    `arena_free_bytes` is what is free of the arena, through which all that is parked comes back.

    `waiting`, `occupying` and `standbys` are indices of `seats`."""

    gpus: tuple[Gpu, ...]
    seats: Mapping[str, Seat]
    rules: Rules = field(default_factory=Rules)
    ram_free_bytes: int = 1 << 62
    waiting: Mapping[str, Seat] = field(default_factory=dict)
    occupying: Mapping[str, Seat] = field(default_factory=dict)
    standbys: tuple[str, ...] = ()
    arena_free_bytes: int = 1 << 62

    @classmethod
    def of(
        cls,
        gpus: Iterable[Gpu],
        seats: Iterable[Seat],
        rules: Rules,
        ram_free_bytes: int = 1 << 62,
        arena_free_bytes: int = 1 << 62,
    ) -> State:
        """Return the state of a node."""
        by_name = {seat.name: seat for seat in seats}
        return cls(
            tuple(gpus),
            by_name,
            rules,
            ram_free_bytes,
            {name: seat for name, seat in by_name.items() if seat.waits},
            {name: seat for name, seat in by_name.items() if seat.occupies},
            tuple(name for name, seat in by_name.items() if seat.stands_by_for),
            arena_free_bytes,
        )

    def with_seat(self, seat: Seat) -> State:
        """Return the state with one seat changed; costs what a copy of three dictionaries does."""
        seats = {**self.seats, seat.name: seat}
        return replace(
            self,
            seats=seats,
            waiting=_indexed(self.waiting, seat, seat.waits),
            occupying=_indexed(self.occupying, seat, seat.occupies),
        )


def _indexed(index: Mapping[str, Seat], seat: Seat, belongs: bool) -> Mapping[str, Seat]:
    if belongs:
        return {**index, seat.name: seat}
    if seat.name in index:
        return {name: one for name, one in index.items() if name != seat.name}
    return index


# ---- what is decided


@dataclass(frozen=True)
class Start:
    """Let a container's start through."""

    seat: str
    reason: str


@dataclass(frozen=True)
class Wake:
    """Bring a seat's VRAM back. Its room is claimed from now on."""

    seat: str
    reason: str


@dataclass(frozen=True)
class Suspend:
    """Take a seat's VRAM away. `again`: it was at work, so it gets a request of its own when this is done."""

    seat: str
    reason: str
    again: bool = False


@dataclass(frozen=True)
class Swap:
    """Suspend one seat and wake another, with both copies overlapped."""

    seat: str
    out: str
    reason: str
    again: bool = False


@dataclass(frozen=True)
class Park:
    """Move a suspended seat's memory below host memory. Its pod stays."""

    seat: str
    reason: str


@dataclass(frozen=True)
class Refuse:
    """Answer the requests whose deadline has passed."""

    seat: str
    reason: str


Action = Start | Wake | Suspend | Swap | Park | Refuse


@dataclass(frozen=True)
class Turn:
    """Why a waiting seat is not active. `before` are the seats in its way, `at` is when that may be over, or NEVER."""

    reason: str
    before: tuple[str, ...] = ()
    at: float = NEVER


@dataclass(frozen=True)
class Decision:
    """What to do now, why each waiting seat waits, and when time alone may change the decision."""

    actions: tuple[Action, ...] = ()
    turns: Mapping[str, Turn] = field(default_factory=dict)
    look_at: float = NEVER
