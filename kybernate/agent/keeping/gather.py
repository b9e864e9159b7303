"""What the policy decides by, made of what the agent's parts know. Without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kybernate.agent.tier_settings import Tiers
from kybernate.messages import agent_pb2 as wire
from kybernate.registry.model import ImageRow, Replica
from kybernate.store.policy.model import (
    Copying,
    ImageState,
    ReplicaState,
    SuspendedState,
    TierState,
)
from kybernate.store.tiers.tier import Room
from kybernate.verbs.copy import Copy
from kybernate.verbs.model import Operation
from kybernate.verbs.restore import Restore


def tier_states(settings: Tiers, rooms: Mapping[str, Room | None]) -> dict[str, TierState]:
    """Return the tiers; one without a room did not answer."""
    found = {}
    for name, room in rooms.items():
        own = getattr(settings, name)
        known = room or Room()
        found[name] = TierState(
            known.capacity, known.free, own.quota, known.used, room is not None, own.read_bytes_per_second
        )
    return found


def image_states(
    rows: Iterable[ImageRow],
    node: str,
    operations: Sequence[Operation],
    places: Mapping[str, str],
) -> tuple[ImageState, ...]:
    """Return the images that can be restored. `places` are the roots of this node's tiers, by their names.

    Copies below a trusted root are in no tier, and are left alone.
    """
    return tuple(
        _image(row, replicas, operations)
        for row in rows
        if row.created is not None and (replicas := _replicas(row, node, places))
    )


def _replicas(row: ImageRow, node: str, places: Mapping[str, str]) -> dict[str, ReplicaState]:
    assert row.created is not None
    found = {}
    for replica in row.replicas:
        if tier := tier_of(replica, node, places):
            since = (replica.verified or row.created).timestamp()
            # What a shim has written or a copy has compared is good until a comparison says otherwise.
            found[tier] = ReplicaState(
                replica.bytes or row.bytes, since, replica.state == "complete", replica.state != "complete"
            )
    return found


def tier_of(replica: Replica, node: str, places: Mapping[str, str]) -> str:
    """Return the tier that a copy is in, "" for none of this node's; `places` are the roots of its own, by name."""
    if not replica.node:
        return "object"
    if replica.node != node:
        return ""
    return next((name for name, root in places.items() if replica.place.startswith(f"{root}/")), "")


def _image(
    row: ImageRow,
    replicas: Mapping[str, ReplicaState],
    operations: Sequence[Operation],
) -> ImageState:
    assert row.created is not None
    own = [one for one in operations if row.id in (one.target.image, *one.target.ref[2:]) or _reads(one, row)]
    annotations = row.annotations
    return ImageState(
        namespace=row.source.namespace,
        id=row.id,
        name=row.name,
        workload=row.workload,
        created=row.created.timestamp(),
        size_bytes=row.bytes,
        replicas=replicas,
        last_used=annotations.last_used.timestamp() if annotations.last_used else 0.0,
        pinned=annotations.pinned,
        wanted_by=tuple(one.id for one in own if isinstance(one.arguments, Restore)),
        copying=tuple(Copying("", one.arguments.tier) for one in own if isinstance(one.arguments, Copy)),
    )


def _reads(operation: Operation, row: ImageRow) -> bool:
    return any(replica.place == operation.target.image for replica in row.replicas)


def suspended_states(containers: Iterable[wire.Container], since: Mapping[str, float]) -> tuple[SuspendedState, ...]:
    """Return the containers whose VRAM is in host memory; `since` says when each was seen like that first.

    One of a pod keeps its processes, for kubelet would start it again from nothing: what it has in the arena is parked.
    """
    return tuple(
        SuspendedState(
            namespace=one.pod_namespace,
            container=one.id,
            workload=one.workload,
            since=since.get(f"{one.namespace}/{one.id}", 0.0),
            bytes=one.arena_bytes if one.pod else one.vram_bytes,
            parkable=not one.operation and not one.parked_bytes and (not one.pod or one.arena_bytes > 0),
        )
        for one in containers
        if one.gpu == wire.Container.SUSPENDED
    )
