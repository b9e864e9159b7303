"""A watch that outlives its connection, and what a client knows of a node by it. Shared by both clients.

The agent numbers its changes. A client that was away names the last number that it has seen, and misses nothing: it
gets what it has missed, or all that there is now, between two bookmarks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from kybernate.messages import agent_pb2 as wire

Key = tuple[str, str]


class Position:
    """How far a watch has come: what the next one is to begin after."""

    def __init__(self) -> None:
        self.revision, self.instance = 0, ""

    def take(self, change: wire.Change) -> None:
        """Note that a change has arrived."""
        self.revision, self.instance = change.revision or self.revision, change.instance


class NodeView:
    """What the agent has reported so far. It may be filled by one thread and read by another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[Key, wire.Change] = {}
        self._snapshot: dict[Key, wire.Change] | None = None  # that is being received

    def take(self, change: wire.Change) -> None:
        """Take over one change; a snapshot replaces all when it is complete."""
        with self._lock:
            if change.bookmark == wire.BOOKMARK_SNAPSHOT_BEGIN:
                self._snapshot = {}
            if (key := key_of(change)) is not None:
                objects = self._objects if self._snapshot is None else self._snapshot
                objects[key] = change
                if change.removed:
                    del objects[key]
            if change.bookmark == wire.BOOKMARK_SNAPSHOT_END and self._snapshot is not None:
                self._objects, self._snapshot = self._snapshot, None

    def _of(self, kind: str) -> list[wire.Change]:
        with self._lock:
            return [change for (one, _), change in self._objects.items() if one == kind]

    def containers(self) -> list[wire.Container]:
        """Return the containers, in no order."""
        return [change.container for change in self._of("container")]

    def gpus(self) -> list[wire.Gpu]:
        """Return the GPUs by their index."""
        return sorted((change.gpu for change in self._of("gpu")), key=lambda one: one.index)

    def operations(self) -> list[wire.Operation]:
        """Return the operations, newest first."""
        return sorted((change.operation for change in self._of("operation")), key=lambda one: one.id, reverse=True)

    def tiers(self) -> list[wire.Tier]:
        """Return the tiers by name."""
        return sorted((change.tier for change in self._of("tier")), key=lambda one: one.name)

    def seats(self) -> list[wire.Seat]:
        """Return the seats, in no order."""
        return [change.seat for change in self._of("seat")]

    def images(self) -> list[wire.Image]:
        """Return the images, in no order."""
        return [change.image for change in self._of("image")]


def key_of(change: wire.Change) -> Key | None:
    """Return the kind and the name of the object that a change is about; None for a bookmark and for an event."""
    match change.WhichOneof("object"):
        case "container":
            return "container", f"{change.container.namespace}/{change.container.id}"
        case "gpu":
            return "gpu", change.gpu.uuid
        case "operation":
            return "operation", change.operation.id
        case "image":
            return "image", change.image.id
        case "tier":
            return "tier", change.tier.name
        case "seat":
            return "seat", change.seat.name
        case _:
            return None


def snapshot_of(changes: Iterable[wire.Change]) -> NodeView:
    """Return what a watch reports up to the end of its first snapshot."""
    view = NodeView()
    for change in changes:
        view.take(change)
        if change.bookmark == wire.BOOKMARK_SNAPSHOT_END:
            break
    return view
