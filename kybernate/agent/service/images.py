"""The registry's rows as messages, and a request's filter as the registry's. Without I/O."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from kybernate.messages import agent_pb2 as wire
from kybernate.node.naming import meant
from kybernate.registry.model import Filter, ImageRow, Page, RegisteredCopy, Replica, ReplicaState

STATES: Final[Mapping[ReplicaState, wire.ReplicaState]] = {
    "complete": wire.COMPLETE,
    "copying": wire.COPYING,
    "damaged": wire.DAMAGED,
    "missing": wire.MISSING,
}


def filter_of(request: wire.ListImagesRequest) -> Filter:
    """Return which images are wanted."""
    return Filter(
        namespace=request.namespace,
        pod=request.pod,
        workload=request.workload,
        source_image=request.source_image,
        tier=request.tier,
        labels=dict(request.labels),
        pinned=request.pinned,
    )


def list_message(page: Page) -> wire.ListImagesResponse:
    """Return a page of a list."""
    return wire.ListImagesResponse(images=map(image_message, page.images), next_page_token=page.token, total=page.total)


def image_message(row: ImageRow, asked: str = "") -> wire.Image:
    """Return an image as callers see it; under the name of the copy that was `asked` for, else of the first one."""
    kept = row.annotations
    copies = [RegisteredCopy(row, replica) for replica in row.replicas]
    named = meant(asked, copies, RegisteredCopy.names) if asked else []
    return wire.Image(
        id=row.id,
        name=named[0].replica.name if named else row.name,
        created=_time(row.created),
        source=wire.Source(
            namespace=row.source.namespace,
            pod=row.source.pod,
            container=row.source.name or row.source.container,
            workload=row.workload,
            image=row.source.image,
            image_digest=row.source.image_digest,
            node=row.source.node,
        ),
        parent=row.lineage.parent,
        generation=kept.generation or 0,
        gpus=[wire.Gpu(uuid=gpu.uuid, model=gpu.model, used_bytes=gpu.bytes) for gpu in row.gpus],
        bytes=row.bytes,
        vram_bytes=row.vram_bytes,
        manifest_digest=row.manifest_digest,
        replicas=map(_replica, row.replicas),
        labels=kept.labels,
        pinned=kept.pinned,
        last_used=_time(kept.last_used),
        last_restore_seconds=kept.last_restore_seconds,
        states=sorted({word for replica in row.replicas for word in replica.findings}),
        encrypted=row.encrypted,
    )


def _replica(replica: Replica) -> wire.Replica:
    return wire.Replica(
        tier=replica.tier,
        node=replica.node,
        place=replica.place,
        state=STATES.get(replica.state),  # none of them: the row is damaged
        bytes=replica.bytes,
        verified=_time(replica.verified),
        name=replica.name,
    )


def _time(when: datetime | None) -> Timestamp | None:
    if when is None:
        return None
    time = Timestamp()
    time.FromDatetime(when)
    return time
