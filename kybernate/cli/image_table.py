"""The table of checkpoint images: the same columns for root and for readers, with an agent and without one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from kybernate.cli.formats import NONE, Table, document_of
from kybernate.cli.output import age, moment, size
from kybernate.messages import agent_pb2 as wire
from kybernate.node.naming import SHORTEST_ID

if TYPE_CHECKING:
    from kybernate.node.images import ListedImage

HEADER = (
    *("NAME", "NAMESPACE", "SOURCE", "SIZE", "AGE", "TIERS", "STATE"),
    *("WORKLOAD", "GENERATION", "PINNED", "LABELS", "USED", "RESTORE", "ID"),  # of the wide table
)
NARROW = 7
ELSEWHERE = "elsewhere"  # the state of an image without a copy on this node
HARMLESS = frozenset({"open to others"})  # states that keep no restore from an image


@dataclass(frozen=True)
class ImageEntry:
    """An image of the table. `path` is its copy on this node, or else the first one; `reason` explains its state."""

    image: wire.Image
    node: str
    usable: bool
    reason: str = ""

    @property
    def here(self) -> list[wire.Replica]:
        """The copies that this node has."""
        return [one for one in self.image.replicas if one.node == self.node]

    @property
    def path(self) -> str:
        known = self.here or list(self.image.replicas)
        return known[0].place if known else ""

    @property
    def names(self) -> tuple[str, ...]:
        """What copies of the image are called, each name once."""
        return tuple(dict.fromkeys((self.image.name, *(one.name for one in self.image.replicas if one.name))))

    @property
    def states(self) -> list[str]:
        here = not self.image.replicas or self.here
        return [*self.image.states, *(() if here else (ELSEWHERE,))]

    def is_named(self, name: str) -> bool:
        """Return whether a name, the beginning of an id, or a pattern fits any copy."""
        one = self.image
        own = {word.rpartition("/")[2] for word in self.names}  # below a trusted root, the path is the name
        known = {one.id, *self.names, *own, *(f"{one.source.namespace}/{word}" for word in (*self.names, *own))}
        places = {replica.place for replica in one.replicas}
        begins = len(name) >= SHORTEST_ID and one.id.startswith(name)
        return begins or any(fnmatchcase(word, name) for word in known | places)


def registered(image: wire.Image, node: str) -> ImageEntry:
    """Return the entry of an image of the registry, on the node of that name."""
    entry = ImageEntry(image, node, usable=False)
    return ImageEntry(image, node, usable=HARMLESS.issuperset(entry.states))


def found(one: ListedImage, tier: str) -> ImageEntry:
    """Return the entry of an image that was found in a directory of this node, in the tier of that name."""
    manifest = one.image.manifest if one.image else None
    source = one.source
    image = wire.Image(
        id=manifest.id if manifest else "",
        name=one.name,
        source=wire.Source(
            namespace=one.namespace,
            pod=source.pod,
            container=source.name or source.container,
            image=source.image,
            image_digest=source.image_digest,
            node=source.node,
        ),
        bytes=one.bytes,
        manifest_digest=one.image.digest if one.image else "",
        replicas=[wire.Replica(tier=tier, place=str(one.place.path), bytes=one.bytes, name=one.name)],
        states=one.states,
        encrypted=bool(manifest and manifest.encryption),
    )
    if one.time:
        image.created.FromDatetime(one.time)
    return ImageEntry(image, "", one.usable, one.reason)


def _row(entry: ImageEntry) -> tuple[object, ...]:
    one = entry.image
    labels = ",".join(f"{key}={value}" for key, value in sorted(one.labels.items()))
    used = moment(one.last_used)
    return (
        ", ".join(entry.names),
        one.source.namespace or NONE,
        _source(one.source) or NONE,
        size(one.bytes) if one.bytes else NONE,
        age(time.time() - moment(one.created)) if one.HasField("created") else NONE,
        ", ".join(_tiers(entry)) or NONE,
        ", ".join((*(("usable",) if entry.usable else ()), *entry.states)) or "open to others",
        one.source.workload or NONE,
        one.generation,
        "yes" if one.pinned else "no",
        labels or NONE,
        age(time.time() - used) if used else NONE,
        f"{one.last_restore_seconds:.1f}s" if one.last_restore_seconds else NONE,
        one.id or NONE,
    )


def _source(source: wire.Source) -> str:
    from kybernate.node.lookup import short_id

    return f"{source.pod}/{source.container}" if source.pod else short_id(source.container)


def _tiers(entry: ImageEntry) -> list[str]:
    """Return the tiers that have a copy, those of other nodes with the node's name."""
    copies = entry.image.replicas
    own = sorted({one.tier for one in copies if one.node in ("", entry.node)})
    return [*own, *sorted({f"{one.node}:{one.tier}" for one in copies if one.node not in ("", entry.node)})]


def document(entry: ImageEntry) -> dict[str, Any]:
    """Return an image as every command prints it."""
    return {
        **document_of(entry.image),
        "namespace": entry.image.source.namespace,
        "path": entry.path,
        "usable": entry.usable,
        "states": entry.states,
        "reason": entry.reason,
    }


TABLE = Table(HEADER, _row, document, NARROW, lambda entry: entry.image.id or entry.path)
