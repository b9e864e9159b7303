"""What the policy knows, and what it may decide. Times are seconds since 1970 (UTC), sizes bytes.

A *replica* is an image's copy in one tier. It is *good* when it was verified, is not damaged, and its tier is healthy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, tzinfo
from enum import IntEnum
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

RAM, DISK, OBJECT = "ram", "disk", "object"
TIERS: Final = (RAM, DISK, OBJECT)  # the fastest first
DURABLE: Final = frozenset({DISK, OBJECT})  # what survives a restart of the node


# ---- what there is


@dataclass(frozen=True)
class TierState:
    """A tier. `capacity_bytes` and `quota_bytes` are 0 where there is no limit; `used_bytes` is what images take.

    A restore from it takes `latency_seconds`, and the time for its bytes.
    """

    capacity_bytes: int = 0
    free_bytes: int = 0
    quota_bytes: int = 0
    used_bytes: int = 0
    healthy: bool = True
    read_bytes_per_second: float = 1 << 30
    latency_seconds: float = 0.0

    def above(self, share: float) -> float:
        """Return how many bytes more it has than `share` of its limits; below, the negative; without limits, -inf."""
        found = [self.used_bytes - share * self.quota_bytes] if self.quota_bytes else []
        if self.capacity_bytes:
            found.append(self.capacity_bytes - self.free_bytes - share * self.capacity_bytes)
        return max(found, default=float("-inf"))

    def seconds(self, size: int) -> float:
        """Return how long it takes to read so many bytes."""
        return self.latency_seconds + size / max(1.0, self.read_bytes_per_second)


@dataclass(frozen=True)
class ReplicaState:
    """An image's copy in one tier, which takes `bytes` there. `damaged`: it was read, and is not what it was."""

    bytes: int
    since: float
    verified: bool = True
    damaged: bool = False


class Key(NamedTuple):
    """What an image is called by in actions."""

    namespace: str
    id: str


@dataclass(frozen=True)
class Copying:
    """A copy of an image that is being made; `source` is empty where it is not known."""

    source: str
    target: str


@dataclass(frozen=True)
class ImageState:
    """An image. `uses` are the times of its restores, `wanted_by` the restores that run or wait now.

    `workload` is empty where none is known. `created` counts as a use: what was checkpointed now is likely to come
    back.
    """

    namespace: str
    id: str
    name: str
    workload: str
    created: float
    size_bytes: int
    replicas: Mapping[str, ReplicaState]
    last_used: float = 0.0
    uses: tuple[float, ...] = ()
    pinned: bool = False
    wanted_by: tuple[str, ...] = ()
    copying: tuple[Copying, ...] = ()

    @property
    def key(self) -> Key:
        return Key(self.namespace, self.id)

    @property
    def owner(self) -> str:
        """NAMESPACE/WORKLOAD."""
        return f"{self.namespace}/{self.workload}"

    @property
    def restores(self) -> tuple[float, ...]:
        """When it was used; `last_used` may be known where `uses` are not."""
        return tuple({*self.uses, *((self.last_used,) if self.last_used else ())})

    @property
    def touched(self) -> float:
        """When it was made or last used."""
        return max((self.created, *self.restores))


@dataclass(frozen=True)
class SuspendedState:
    """A container whose VRAM is in host memory, `bytes` that go to the disk where it is parked, if it is `parkable`."""

    namespace: str
    container: str
    workload: str
    since: float
    bytes: int
    last_active: float = 0.0
    parkable: bool = True

    @property
    def idle_since(self) -> float:
        return max(self.since, self.last_active)


@dataclass(frozen=True)
class State:
    """All that a decision depends on.

    `arena` is the room of suspended containers. `uses` has the uses of workloads (NAMESPACE/WORKLOAD) whose images may
    be gone. While the clock is not `clock_trusted`, nothing is done because of its age.
    """

    now: float
    tiers: Mapping[str, TierState]
    images: tuple[ImageState, ...] = ()
    suspended: tuple[SuspendedState, ...] = ()
    arena: TierState | None = None
    uses: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    clock_trusted: bool = True

    def healthy(self, tier: str) -> bool:
        return tier in self.tiers and self.tiers[tier].healthy

    def good(self, image: ImageState) -> Iterator[str]:
        """Yield the tiers that have a good replica, the fastest first."""
        for tier in self.readable(image):
            if image.replicas[tier].verified:
                yield tier

    def readable(self, image: ImageState) -> Iterator[str]:
        """Yield the tiers that a copy may be made from, the fastest first: it is verified while it is made."""
        for tier in TIERS:
            if tier in image.replicas and not image.replicas[tier].damaged and self.healthy(tier):
                yield tier


# ---- by which rules


@dataclass(frozen=True)
class TierRules:
    """Shares of a tier's limits: above `high`, images leave it until it is below `low`."""

    high: float = 0.9
    low: float = 0.8


@dataclass(frozen=True)
class WorkloadRules:
    """How long images are kept, and where. Seconds; 0 means never, `keep_last` 0 all.

    `minimum_copies` counts replicas outside of memory.
    """

    ttl: float = 0.0
    keep_last: int = 0
    minimum_copies: int = 1
    park_after: float = 0.0
    prefetch: bool = True
    pinned: bool = False


@dataclass(frozen=True)
class Rules:
    """All rules. `workloads` are patterns of NAMESPACE/WORKLOAD with theirs; the first that matches applies.

    `persist_after`, `half_life`, `prefetch_margin` and `prefetch_hold` are seconds, `park_high` and `park_low` shares
    of the arena (above 1: never), `zone` is where usual times of use are understood.
    """

    tiers: Mapping[str, TierRules] = field(default_factory=dict)
    default: WorkloadRules = WorkloadRules()
    workloads: tuple[tuple[str, WorkloadRules], ...] = ()
    persist_after: float = 60.0
    half_life: float = 86400.0
    prefetch_margin: float = 90.0
    prefetch_hold: float = 1800.0
    park_high: float = 1.0
    park_low: float = 0.8
    zone: tzinfo = UTC

    def of(self, owner: str) -> WorkloadRules:
        """Return the rules of NAMESPACE/WORKLOAD."""
        return next((rules for pattern, rules in self.workloads if fnmatchcase(owner, pattern)), self.default)

    def tier(self, name: str) -> TierRules:
        return self.tiers.get(name, TierRules())


# ---- what is decided


class Priority(IntEnum):
    """Which copy goes first: the lowest. The policy plans none of the first two."""

    RESTORE = 0  # a container waits for it
    REQUEST = 1  # a client has asked for it
    PREFETCH = 2
    DEMOTION = 3
    PERSISTENCE = 4
    PROMOTION = 5


@dataclass(frozen=True)
class Copy:
    """Copy an image from one tier to another, and verify it."""

    image: Key
    source: str
    target: str
    priority: Priority
    reason: str


@dataclass(frozen=True)
class Evict:
    """Remove the replica in one tier."""

    image: Key
    tier: str
    reason: str


@dataclass(frozen=True)
class Park:
    """Move what a suspended container has in host memory to the disk: one without a pod is checkpointed and ended."""

    namespace: str
    container: str
    reason: str


@dataclass(frozen=True)
class Delete:
    """Remove an image from all tiers."""

    image: Key
    reason: str


Action = Copy | Evict | Park | Delete
