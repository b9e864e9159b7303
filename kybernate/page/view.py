"""What the page shows, as values that do not depend on where they come from.

Times are seconds since 1970, sizes are bytes. A `key` identifies an object of its kind, and is what an action names.
All strings may have been chosen by a tenant: the templates escape each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final


class Section(StrEnum):
    """A part of the page that changes as a whole."""

    STATUS = "status"
    GPUS = "gpus"
    SEATS = "seats"
    CONTAINERS = "containers"
    OPERATIONS = "operations"
    TIERS = "tiers"
    IMAGES = "images"
    EVENTS = "events"
    WHY = "why"  # of the container that is looked at


@dataclass(frozen=True)
class Share:
    """What a container, by its key, holds of a GPU's memory."""

    container: str
    bytes: int


@dataclass(frozen=True)
class Gpu:
    """One GPU. `used` is what the driver reports, of all programs; `shares` are those of containers, largest first."""

    key: str
    index: int
    model: str
    total: int
    used: int
    shares: tuple[Share, ...] = ()

    @property
    def other(self) -> int:
        """Return what programs hold that are in no container of the agent's, and the driver itself."""
        return max(0, self.used - sum(one.bytes for one in self.shares))


@dataclass(frozen=True)
class Seat:
    """A claim on a group of GPUs, and the container that has it. `status` is the arbiter's word, such as "active".

    `waits` are the causes of its open requests to be active. `before` are seats that are in its way. Times are 0 where
    they are not known.
    """

    key: str
    profile: str = ""
    group: str = ""
    gpus: tuple[int, ...] = ()  # indices
    status: str = "free"
    since: float = 0.0
    container: str = ""  # key
    title: str = ""
    priority: int = 0
    need: int = 0
    held: int = 0
    busy: bool = False
    waits: tuple[str, ...] = ()
    reason: str = ""
    before: tuple[str, ...] = ()
    turn_at: float = 0.0
    failures: int = 0
    retry_at: float = 0.0
    error: str = ""
    stands_by_for: str = ""


@dataclass(frozen=True)
class Container:
    """A container. `gpu` is the state of its GPU memory: "attached", "suspended", "parked", …; empty without any."""

    key: str
    title: str
    image: str = ""
    state: str = ""
    gpu: str = ""
    host_bytes: int = 0  # of its VRAM, while it is suspended
    gpus: tuple[str, ...] = ()  # keys
    operation: str = ""
    note: str = ""
    problem: str = ""
    workload: str = ""
    started: float = 0.0
    restored_from: str = ""
    pod_namespace: str = ""
    pod: str = ""
    name: str = ""
    in_flight: int = 0  # requests that it answers
    waits_for: str = ""  # before it takes memory on its GPUs

    @property
    def phase(self) -> str:
        """Return the one word that a table shows: of its GPU memory where that is not simply in use."""
        return self.gpu if self.gpu and self.gpu != "attached" else self.state or "no task"


@dataclass(frozen=True)
class Step:
    """A finished step of an operation."""

    name: str
    seconds: float
    bytes: int = 0


@dataclass(frozen=True)
class Operation:
    """Something that was asked for. `state` is one of `LIVE`, "succeeded", "failed" or "cancelled"."""

    key: str
    verb: str
    state: str
    container: str = ""  # key
    subject: str = ""
    requester: str = ""
    created: float = 0.0
    ended: float = 0.0
    step: str = ""
    done: int = 0
    total: int = 0
    seconds_left: float = 0.0
    error: str = ""
    advice: str = ""
    steps: tuple[Step, ...] = ()

    @property
    def live(self) -> bool:
        return self.state in LIVE

    @property
    def seconds(self) -> float:
        """Return how long it took, 0 while it runs."""
        return max(0.0, self.ended - self.created) if self.ended else 0.0


AWAY: Final = frozenset({"suspended", "parked"})  # phases of containers whose VRAM is on no GPU
LIVE: Final = frozenset({"pending", "running", "cancelling"})


@dataclass(frozen=True)
class Tier:
    """A place for images. `capacity` is 0 where it is unknown."""

    key: str
    path: str
    capacity: int = 0
    used: int = 0
    free: int = 0
    images: int = 0


@dataclass(frozen=True)
class Image:
    """A checkpoint image. `tiers` are those that have a complete copy."""

    key: str
    name: str
    source: str = ""
    created: float = 0.0
    bytes: int = 0
    vram_bytes: int = 0
    tiers: tuple[str, ...] = ()
    pinned: bool = False
    states: tuple[str, ...] = ()
    restore_seconds: float = 0.0


@dataclass(frozen=True)
class Event:
    """Something that happened. `level` is "info", "warning" or "error"."""

    key: int
    time: float
    type: str
    level: str
    message: str
    container: str = ""  # the end of a key: the container's id


Object = Gpu | Seat | Container | Operation | Tier | Image | Event
SECTIONS: Final[dict[type, Section]] = {
    Gpu: Section.GPUS,
    Seat: Section.SEATS,
    Container: Section.CONTAINERS,
    Operation: Section.OPERATIONS,
    Tier: Section.TIERS,
    Image: Section.IMAGES,
    Event: Section.EVENTS,
}


@dataclass(frozen=True)
class Put:
    """An object that is new or has changed."""

    object: Object


@dataclass(frozen=True)
class Gone:
    """An object that is there no more."""

    object: Object


@dataclass(frozen=True)
class Begin:
    """What follows until `End` is all that there is."""


@dataclass(frozen=True)
class End:
    """The end of what `Begin` began."""


@dataclass(frozen=True)
class Lost:
    """The source does not answer, since now; `why` is a sentence."""

    why: str
    advice: str = ""


@dataclass(frozen=True)
class Found:
    """The source answers again, or for the first time."""

    name: str
    versions: tuple[tuple[str, str], ...] = field(default=())


Change = Put | Gone | Begin | End | Lost | Found
