"""What an operation is. Frozen dataclasses without I/O, and without the wire's messages.

A `Submission` is what a caller asks for. Its `Target` is what that means on this node, decided before the operation is
journalled. An `Operation` is the journal's record: both of them, and what has become of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal

DAY = 86400.0  # seconds
LONGEST_TEXT = 2048  # characters of each text of an error that is kept
SEAT = "kybernate.io/seat"  # label of what the arbiter of seats has begun: others may wait for it, and not it for them
GPU, DISK = "gpu ", "disk "  # begin the names of what bytes are copied through; see Target.copies


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


# ---- what is asked for


@dataclass(frozen=True)
class Arguments:
    """What is asked for. Each verb derives its own from it, see verb.py; a field without a default must not be empty.

    `verb` is its name, in the journal, in events and in the audit log.
    """

    verb: ClassVar[str] = ""


@dataclass(frozen=True)
class Submission:
    """A request for an operation.

    `key` is the caller's idempotency key, unique within `scope`: "" for operators, and a container for its own
    processes, whose keys do not concern others. `seconds` is the time until the deadline, 0 for the configured one.
    `immediate`: refuse it where another operation has, or waits for, what it would hold.
    """

    arguments: Arguments
    requester: str = ""
    key: str = ""
    scope: str = ""
    seconds: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)
    immediate: bool = False


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


def steps_of(steps: Iterable[Any]) -> tuple[Step, ...]:
    """Return the steps of a shim's answer."""
    return tuple(Step(step.name, step.seconds, step.bytes, step.spared_bytes) for step in steps)


@dataclass(frozen=True)
class Progress:
    """How far the running step is. `seconds` since the operation began; `seconds_left` of this step, 0 if unknown.

    `waits_for` is what it waits for, in words, empty where it does not.
    """

    step: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    seconds: float = 0.0
    seconds_left: float = 0.0
    waits_for: str = ""


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
    left_vram_bytes: int = 0  # of a swap: of the container that left
    left_spared_bytes: int = 0  # of those, what needed no copy
    pid: int = 0
    seconds: float = 0.0  # that checkpoint, restore or swap took by themselves; 0: as the operation
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
        return self.arguments.verb

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
    """What is heard of a running operation: the step that it is at, how far, and in `note` what it waits for."""

    step: str
    done_bytes: int = 0
    total_bytes: int = 0
    note: str = ""


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
