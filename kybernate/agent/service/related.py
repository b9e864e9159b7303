"""Which images of a container's lineage other nodes and the object store have, for shims that look for the newest.

The namespace is that of the pod, by the shim's word, and no image of another one is listed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

from kybernate.node.failure import Failure
from kybernate.registry.model import ImageRow
from kybernate_shim.messages import fetch_pb2 as wire
from kybernate_shim.ttrpc import Call, Code, Method, RpcError

MOST_WORDS = 8


class Related:
    """Answers shims. `elsewhere` returns images with their names, as Replicas has it; it blocks."""

    def __init__(self, elsewhere: Callable[[str, str, Collection[str]], Sequence[tuple[str, ImageRow]]]) -> None:
        self._elsewhere = elsewhere

    def methods(self) -> Mapping[str, Method]:
        """Return what is served."""
        return {"Related": Method(wire.RelatedRequest, self._answer)}

    async def _answer(self, request: wire.RelatedRequest, call: Call) -> wire.RelatedResponse:
        if not request.namespace or len(request.words) > MOST_WORDS:
            raise RpcError(Code.INVALID_ARGUMENT, f"a namespace and at most {MOST_WORDS} words are wanted")
        try:
            found = await asyncio.to_thread(self._elsewhere, request.namespace, request.name, list(request.words))
        except Failure as error:
            raise RpcError(Code.UNAVAILABLE, str(error)) from error
        return wire.RelatedResponse(images=[image(name, row) for name, row in found if row.created is not None])


def image(name: str, row: ImageRow) -> wire.RelatedImage:
    """Return an image as shims compare it with their own."""
    assert row.created is not None
    return wire.RelatedImage(
        name=name,
        id=row.id,
        time=row.created.isoformat(),
        container=row.source.container,
        container_name=row.source.name,
        pod=row.source.pod,
        pod_uid=row.lineage.pod_uid,
        origin=row.lineage.origin,
        parent=row.lineage.parent,
    )
