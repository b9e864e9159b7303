"""What an operation is. Frozen dataclasses without I/O, and without the wire's messages.

A `Submission` is what a caller asks for. Its `Target` is what that means on this node, decided before the operation is
journalled. An `Operation` is the journal's record: both of them, and what has become of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

DAY = 86400.0  # seconds
LONGEST_TEXT = 2048  # characters of each text of an error that is kept


class State(StrEnum):
    """Where an operation is in its life; see MOVES."""

    PENDING = "pending"
    RUNNING = "running"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


FINAL = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED})
MOVES: Mapping[State, frozenset[State]] = {
    State.PENDING: frozenset({State.RUNNING, State.FAILED, State.CANCELLED}),
    State.RUNNING: frozenset({State.RUNNING, State.CANCELLING, *FINAL}),
    State.CANCELLING: frozenset({State.CANCELLING, *FINAL}),
}
Cause = Literal["", "requested", "deadline"]  # why an operation is undone


# ---- what is asked for; a class for each verb


@dataclass(frozen=True)
class Checkpoint:
    """`name` is a container as a person names it; `path` a name for the image, a directory, or empty.

    `hold_timeout` is in seconds, 0 as configured.
    `max_freeze` is the most seconds for which it may be frozen, 0 for what its pod or the node says.
    """

    name: str
    namespace: str = ""
    path: str = ""
    exit: bool = False
    tcp: str = ""
    without_rootfs: bool = False
    force: bool = False
    hold: bool = False
    hold_timeout: float = 0
    volumes: str = ""
    max_freeze: float = 0


@dataclass(frozen=True)
class Restore:
    """`name` is the id of the new container, empty for one of the agent's.

    `container_image` and the rest replace what the source had; `log_path` is a file for the output. An image that is
    not on the node arrives while it is restored; `from_store`: also one that is there, from the object store.
    """

    image: str
    name: str = ""
    namespace: str = ""
    container_image: str = ""
    runtime: str = ""
    snapshotter: str = ""
    log_path: str = ""
    force: bool = False
    from_store: bool = False


@dataclass(frozen=True)
class Suspend:
    """`lock_timeout` in seconds; 0 means as configured."""

    name: str
    namespace: str = ""
    lock_timeout: float = 0.0


@dataclass(frozen=True)
class Resume:
    """In seconds: `room_timeout` is how long it may wait for room on the GPUs, `restore_timeout` the driver's limit."""

    name: str
    namespace: str = ""
    room_timeout: float = 0.0
    restore_timeout: float = 0.0


@dataclass(frozen=True)
class Swap:
    """`leaving` is suspended, and `coming` resumed, which waits `room_timeout` seconds for the room that is left."""

    leaving: str
    coming: str
    namespace: str = ""
    room_timeout: float = 0.0


@dataclass(frozen=True)
class Verify:
    image: str


@dataclass(frozen=True)
class Delete:
    """`force`: also where the image is pinned."""

    image: str
    force: bool = False


@dataclass(frozen=True)
class Import:
    """`path` is an archive or a directory; `name` and `namespace` are the image's new ones."""

    path: str
    name: str = ""
    namespace: str = ""


@dataclass(frozen=True)
class Export:
    """`path` is the archive that is written."""

    image: str
    path: str


@dataclass(frozen=True)
class Copy:
    """`tier` is where the image is to be; `demote`: and no longer in the tiers that are faster.

    `priority` is one of PRIORITIES, by which transfers of one node let each other pass.
    """

    image: str
    tier: str
    priority: str = "request"
    demote: bool = False


@dataclass(frozen=True)
class Evict:
    image: str
    tier: str


PRIORITIES = ("restore", "request", "prefetch", "demotion")
Arguments = Checkpoint | Restore | Suspend | Resume | Swap | Verify | Delete | Import | Export | Copy | Evict
VERBS: Mapping[str, type[Arguments]] = {
    "checkpoint": Checkpoint,
    "restore": Restore,
    "suspend": Suspend,
    "resume": Resume,
    "swap": Swap,
    "verify": Verify,
    "delete": Delete,
    "import": Import,
    "export": Export,
    "copy": Copy,
    "evict": Evict,
}
_NAMES = {arguments: verb for verb, arguments in VERBS.items()}


@dataclass(frozen=True)
class Submission:
    """A request for an operation.

    `key` is the caller's idempotency key, unique within `scope`: "" for operators, and a container for its own
    processes, whose keys are no affair of others. `seconds` is the time until the deadline, 0 for the configured one.
    """

    arguments: Arguments
    requester: str = ""
    key: str = ""
    scope: str = ""
    seconds: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """What a request means on this node.

    `container` is an id in containerd's `namespace`: of a swap the one that leaves, of a restore the new one. `image`
    is the directory of the image, `archive` a file that is read or written. An operation has what it `holds` for
    itself, shares what it `shares`, and copies bytes through the GPUs and disks in `copies`: "gpu GPU-…", "disk 259:1".
    """

    namespace: str = ""
    container: str = ""
    title: str = ""
    other: str = ""
    other_title: str = ""
    image: str = ""
    archive: str = ""
    ref: tuple[str, ...] = ()  # namespace, name and id of an image that moves between tiers, or arrives for a restore
    writes: str = ""  # a path that must not be there before, and that proves success when it is whole
    holds: tuple[str, ...] = ()
    shares: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()


# ---- what becomes of it


@dataclass(frozen=True)
class Step:
    """One finished part. `spared_bytes` of its bytes needed no copy."""

    name: str
    seconds: float = 0.0
    bytes: int = 0
    spared_bytes: int = 0


@dataclass(frozen=True)
class Progress:
    """How far the running step is. `seconds` since the operation began; `seconds_left` of this step, 0 if unknown."""

    step: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    seconds: float = 0.0
    seconds_left: float = 0.0


@dataclass(frozen=True)
class Result:
    """The numbers of an operation that succeeded; those that its verb does not have are empty."""

    path: str = ""
    image_id: str = ""
    manifest_digest: str = ""
    bytes: int = 0
    frozen_ms: int = 0
    vram_bytes: int = 0
    arena_bytes: int = 0
    arena_reasons: tuple[str, ...] = ()
    pid: int = 0
    source: str = ""  # tier or store of a restore's image
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Fault:
    """Why an operation failed. `type` names the fact, `state` says what is true now, `advice` what to do."""

    type: str
    message: str
    state: str = ""
    advice: str = ""

    def trimmed(self) -> Fault:
        """Return what the journal keeps of it: errors of CRIU and of a shim quote what a container has written."""
        texts = (text[:LONGEST_TEXT] for text in (self.message, self.state, self.advice))
        return Fault(self.type, *texts)


@dataclass(frozen=True)
class Operation:
    """An operation as the journal has it, and `progress`, which is never written. Times are seconds since 1970.

    `number` is its place in the order of submission, `boot` the boot of the node in which it began, `attempts` how many
    times the agent began it, `revision` the number of its changes.
    """

    id: str
    arguments: Arguments
    target: Target
    created: float
    number: int = 0
    state: State = State.PENDING
    requester: str = ""
    key: str = ""
    scope: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    deadline: float | None = None
    started: float | None = None
    ended: float | None = None
    cause: Cause = ""
    boot: str = ""
    attempts: int = 0
    steps: tuple[Step, ...] = ()
    result: Result | None = None
    fault: Fault | None = None
    notes: tuple[str, ...] = ()
    revision: int = 0
    progress: Progress | None = field(default=None, compare=False)

    @property
    def verb(self) -> str:
        return _NAMES[type(self.arguments)]

    @property
    def final(self) -> bool:
        return self.state in FINAL

    def is_late(self, now: float) -> bool:
        """Return whether its deadline has passed."""
        return self.deadline is not None and now >= self.deadline


class Seen(StrEnum):
    """What is known of an operation that has begun."""

    ATTENDED = "attended"  # a task of this agent carries it out and waits for its end
    LOOKING = "looking"  # it is being looked up or rolled back at this moment
    AT_WORK = "at work"  # the shim carries it out, and no task of this agent waits for it
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"  # it was undone on request
    HALF_DONE = "half done"  # the agent's own work; has to be rolled back
    ABSENT = "absent"  # nothing of it is there
    UNREACHABLE = "unreachable"  # it cannot be found out now


@dataclass(frozen=True)
class Observation:
    """What was seen of an operation at the time `at`, in words in `note`. `asked`: its end was asked for."""

    seen: Seen
    note: str = ""
    result: Result | None = None
    fault: Fault | None = None
    asked: bool = False
    at: float = 0.0


@dataclass(frozen=True)
class Report:
    """What is heard of a running operation: the step that it is at, and how far."""

    step: str
    done_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True)
class Limits:
    """What may happen at the same time, and how long things are kept. Seconds; `deadline` 0 means none."""

    running: int = 64
    pending: int = 10_000
    copies_per_gpu: int = 2
    copies_per_disk: int = 2
    deadline: float = 0.0
    keep: float = 7 * DAY
    keep_keys: float = DAY
    keep_of_one: int = 1000  # ended operations of a container: one that asks without end fills no disk
