"""What the registry says of an image: plain values, without a database and without files.

A copy of an image with another manifest is another image: its namespace, its encryption or its signature differ.
So the key of an image is its manifest's digest; its `id` stays the same through `kybernate encrypt` and `import`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from kybernate.node.failure import Invalid
from kybernate.node.naming import Names, names_of
from kybernate_shim.checkpoint.image.manifest import Lineage, Source

ReplicaState = Literal["complete", "copying", "damaged", "missing"]
DAMAGED: Final = "damaged:"  # begins the key of what has no readable manifest
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND: Final = timedelta(microseconds=1)
EARLIEST: Final = (datetime(1, 1, 2, tzinfo=UTC) - EPOCH) // MICROSECOND
LATEST: Final = (datetime(9999, 12, 30, tzinfo=UTC) - EPOCH) // MICROSECOND
MOST_LABELS: Final = 64
LABEL_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/-]{0,251}[A-Za-z0-9])?")
LONGEST_VALUE: Final = 253  # characters of a label's value
LARGEST: Final = (1 << 63) - 1  # that both databases have a column for


@dataclass(frozen=True)
class Annotations:
    """What no manifest says of an image. `revision` rises by one with each change, 0 where nothing was ever kept.

    `generation` counts the images of a workload's container from 0, None where it is not known; `parent` is the id of
    the image that this one builds on. `workload` is the owner of the pod, "" where only the pod's own name is known.
    """

    revision: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    pinned: bool = False
    last_used: datetime | None = None
    last_restore_seconds: float = 0.0
    workload: str = ""
    parent: str = ""
    generation: int | None = None


@dataclass(frozen=True)
class Gpu:
    """A GPU that the container used, and how many bytes of its memory."""

    uuid: str
    model: str
    driver: str
    bytes: int


@dataclass(frozen=True)
class Replica:
    """A copy of an image: a directory of `node`, or a URL, whose node is "".

    `findings` are the words of `kybernate images` for what is wrong with it, and `reason` is their explanation.
    `revision` is that of the annotations that are kept with it.
    """

    node: str
    place: str
    tier: str
    name: str = ""
    state: ReplicaState = "complete"
    bytes: int = 0
    verified: datetime | None = None
    findings: tuple[str, ...] = ()
    reason: str = ""
    revision: int = 0


@dataclass(frozen=True)
class ImageRow:
    """An image with all its replicas, at least one. `key` is the manifest's digest, or begins with DAMAGED.

    `bytes` are the payload of all files, `created` is None where the manifest cannot be read. `lineage` has the parent
    of the annotations where the manifest names none.
    """

    key: str
    id: str
    created: datetime | None
    source: Source
    bytes: int = 0
    vram_bytes: int = 0
    encrypted: bool = False
    gpus: tuple[Gpu, ...] = ()
    annotations: Annotations = field(default_factory=Annotations)
    replicas: tuple[Replica, ...] = ()
    lineage: Lineage = field(default_factory=Lineage)

    @property
    def manifest_digest(self) -> str:
        """The digest of the manifest, "" where it cannot be read."""
        return "" if self.key.startswith(DAMAGED) else self.key

    @property
    def workload(self) -> str:
        return workload_of(self.source, self.annotations)

    @property
    def name(self) -> str:
        """The name of its first replica. Others may be called differently: see `names`."""
        return self.replicas[0].name if self.replicas else ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all replicas, each once."""
        return tuple(dict.fromkeys(replica.name for replica in self.replicas if replica.name))


@dataclass(frozen=True)
class RegisteredCopy:
    """A replica, with the image that it is a copy of."""

    row: ImageRow
    replica: Replica

    def names(self) -> Names:
        """Return what the copy may be called."""
        row, replica = self.row, self.replica
        return names_of(replica.place, row.id, replica.name, row.source.namespace, row.key)


@dataclass(frozen=True)
class Filter:
    """Which images are listed; an empty field lets all pass. All `labels` must be there with their values.

    `workload` also is what an image of a pod without a known owner has: the pod's name.
    """

    namespace: str = ""
    pod: str = ""
    workload: str = ""
    source_image: str = ""
    tier: str = ""
    node: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    pinned: bool = False


@dataclass(frozen=True)
class Page:
    """Some images, newest first. `token` is for the next page, "" at the end; `total` counts those of all pages."""

    images: tuple[ImageRow, ...]
    token: str
    total: int


@dataclass(frozen=True)
class TierTotals:
    """The replicas in a tier of a node."""

    node: str
    tier: str
    replicas: int
    bytes: int


@dataclass(frozen=True)
class Totals:
    """Sums over the registry. `bytes` counts each image once, `tiers` each replica; `states` counts replicas."""

    images: int
    bytes: int
    vram_bytes: int
    pinned: int
    states: Mapping[str, int]
    tiers: tuple[TierTotals, ...]


def workload_of(source: Source, annotations: Annotations) -> str:
    """Return the owner that is known, else the pod, else the container."""
    return annotations.workload or source.pod or source.container


def damaged_key(node: str, place: str) -> str:
    """Return the key of an image whose manifest cannot be read, and which is known by its place alone."""
    return f"{DAMAGED}{_hashed(node, place)}"


def replica_key(node: str, place: str) -> str:
    """Return the key of a replica's row. A path may be longer than what PostgreSQL accepts in an index."""
    return _hashed(node, place)


def _hashed(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode(errors="surrogatepass")).hexdigest()


def micros(time: datetime | None) -> int | None:
    """Return a time as a database has it: microseconds since the epoch, within the years that a calendar has."""
    return None if time is None else min(max((time - EPOCH) // MICROSECOND, EARLIEST), LATEST)


def moment(value: int | None) -> datetime | None:
    """Return the time that `micros` gave."""
    return None if value is None else EPOCH + timedelta(microseconds=value)


def now() -> datetime:
    """Return the time, as precise as a database keeps it."""
    return datetime.now(UTC)


def require_labels(labels: Mapping[str, str], *, state: str = "no label was changed") -> None:
    """Raise Invalid, with `state`, for what is no set of labels."""
    if len(labels) > MOST_LABELS:
        raise Invalid(f"{len(labels)} labels, at most {MOST_LABELS} are kept", state=state)
    for name, value in labels.items():
        if not LABEL_NAME.fullmatch(name):
            raise Invalid(
                f"{name[:300]!r} is not the name of a label",
                state=state,
                advice="letters, digits, `.`, `_`, `-` and `/`, at most 253, with a letter or digit at both ends",
            )
        if len(value) > LONGEST_VALUE or not value.isprintable():
            raise Invalid(f"label {name}: a value has at most {LONGEST_VALUE} printable characters", state=state)
