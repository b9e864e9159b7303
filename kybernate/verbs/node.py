"""What verbs need of the node, and how the containers that a request names are found there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kybernate.node.containerd import Containerd
from kybernate.node.lookup import KnownContainer
from kybernate.verbs.model import GPU, Target
from kybernate.verbs.room import OPEN, Room

if TYPE_CHECKING:  # the extra `store`, and what takes long to load
    from kybernate.store.movement.turns import Turns
    from kybernate.store.tiers.tier import Held, Ref, Tier
    from kybernate.store.transfer import TransferProgress
    from kybernate_shim.checkpoint.image.manifest import Source


@dataclass(frozen=True)
class Elsewhere:
    """An image that another node or the object store has: of what it was made, and which GPUs that used, by UUID."""

    ref: Ref
    source: Source
    gpus: Sequence[str] = ()


@dataclass(frozen=True)
class ParkedContainer:
    """A container that a resume restores. `image` is an id, `log` the file that its output is appended to, or empty."""

    id: str
    namespace: str
    image: str
    log: str = ""


class Tiers(Protocol):
    """The tiers of the node, by name."""

    async def named(self, name: str) -> Tier:
        """Return a tier. Raises Failure."""

    def sources(self, target: str, nodes: Sequence[str]) -> Sequence[Tier]:
        """Return the tiers that an image may come from, the best first."""

    def others(self, name: str) -> Sequence[Tier]:
        """Return the other tiers of this node."""


class Replicas(Protocol):
    """What the registry has of copies. Blocks."""

    def other_nodes(self, ref: Ref) -> Sequence[str]: ...
    def stored(self, tier: str, held: Held, manifest: bytes) -> None: ...
    def gone(self, held: Held) -> None: ...


class TransferLimits(Protocol):
    """How images are transferred; `bytes_per_second` 0: without a limit."""

    @property
    def parallel(self) -> int: ...
    @property
    def compression(self) -> int | None: ...
    @property
    def bytes_per_second(self) -> int: ...


@dataclass(frozen=True)
class Movement:
    """What moves images between tiers. `changed` gets each directory in which an image appeared or disappeared."""

    tiers: Tiers
    turns: Turns
    replicas: Replicas
    limits: Callable[[], TransferLimits]
    changed: Callable[[Path], object]


class Arriving(Protocol):
    """Brings images that are not on the node."""

    def in_memory(
        self, ref: Ref, restore: str, report: Callable[[TransferProgress], object], *, stored: bool
    ) -> AbstractAsyncContextManager[Path]:
        """Bring an image for one restore, and yield its directory when that may begin."""


@dataclass(frozen=True)
class Node:
    """What the node's other parts know, and how to reach containerd. A command without an agent has the address alone.

    `gpus_of` returns the UUIDs of the GPUs that a container, by its id, uses, as far as known. `image_of` returns the
    directory of the image that a name means here, None where the registry knows none or does not answer. `is_pinned`
    says it of an image's directory. `ref_of` returns namespace, name and id of the image, in whichever tier it is, that
    a request to move one names, and `tiers` their names. `elsewhere` returns an
    image that another node or the object store has, with True the object store; None where neither does. `pod_of`
    returns a pod, by namespace and name, as the cluster's API has it; None where the agent does not know it. `parked`
    returns the parked container that a name means, `freed` also removes its record in containerd, whose name its
    restore takes; None where it is not parked, or has processes. `in_flight` returns how many requests a container
    answers, by namespace and id, as others report. `room` is asked before memory on GPUs is taken.
    """

    address: str
    boot: str = ""
    gpus_of: Callable[[str], Sequence[str]] = lambda id: ()
    image_of: Callable[[str], Path | None] = lambda name: None
    is_pinned: Callable[[Path], bool] = lambda path: False
    ref_of: Callable[[Any], tuple[str, str, str]] = lambda wanted: ("", wanted.image, "")
    pod_of: Callable[[str, str], Mapping[str, Any] | None] = lambda namespace, name: None
    tiers: Callable[[], Sequence[str]] = lambda: ()
    elsewhere: Callable[[str, bool], Elsewhere | None] = lambda name, stored: None
    parked: Callable[[str], ParkedContainer | None] = lambda name: None
    freed: Callable[[str], ParkedContainer | None] = lambda name: None
    in_flight: Callable[[str, str], int] = lambda namespace, id: 0
    movement: Movement | None = None
    arrivals: Arriving | None = None
    room: Room = field(default=OPEN)


def running(node: Node, name: str, namespace: str) -> KnownContainer:
    """Return the container that a name means. Raises Missing and Ambiguous."""
    with Containerd(node.address) as containerd:
        found = containerd.find(name, namespace)
    if not found.live:
        from kybernate.node.failure import Missing
        from kybernate.node.shim import life_of

        raise Missing(f"container {found.title} has no processes: {life_of(found)}")
    return found


def of_containers(node: Node, *containers: KnownContainer) -> Target:
    """Return the target of what is done to one container, or two, for themselves."""
    first, last = containers[0], containers[-1]
    gpus = {gpu for container in containers for gpu in node.gpus_of(container.id)}
    return Target(
        namespace=first.namespace,
        container=first.id,
        title=first.title,
        other=last.id if len(containers) > 1 else "",
        other_title=last.title if len(containers) > 1 else "",
        holds=tuple(f"container {container.namespace}/{container.id}" for container in containers),
        copies=tuple(f"{GPU}{gpu}" for gpu in sorted(gpus)),
    )
