"""What shims ask of the agent: about images of their containers, and for room on GPUs before a container starts.

No call of a shim gives it an image or a digest. A namespace is that of the pod as the shim states it, and no image of
another one is listed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Final

from kybernate.node.containerd import ContainerdRefused, ContainerdUnreachable
from kybernate.node.failure import Failure
from kybernate.registry.model import ImageRow
from kybernate.verbs.room import Room, Taker
from kybernate_shim.messages import fetch_pb2 as wire
from kybernate_shim.messages import room_pb2
from kybernate_shim.ttrpc import Call, Code, Method, RpcError, Services

ROOM: Final = "kybernate.room.v1.Room"
MOST_WORDS: Final = 8  # of a request for images


class Described:
    """Says which image a container has. `image_of` returns reference and digest, by containerd's namespace and id."""

    def __init__(self, image_of: Callable[[str, str], Awaitable[tuple[str, str]]]) -> None:
        self._image_of = image_of

    def methods(self) -> Mapping[str, Method]:
        """Return what is served."""
        return {"Describe": Method(wire.DescribeRequest, self._answer)}

    async def _answer(self, request: wire.DescribeRequest, call: Call) -> wire.DescribeResponse:
        try:
            image, digest = await self._image_of(request.namespace, request.container)
        except (ContainerdUnreachable, ContainerdRefused) as error:
            raise RpcError(Code.UNAVAILABLE, str(error)) from error
        if not digest:
            raise RpcError(Code.NOT_FOUND, f"the image of container {request.container[:300]} is not known")
        return wire.DescribeResponse(image=image, digest=digest)


class Related:
    """Says which images of a container's lineage other nodes and the object store have.

    `elsewhere` returns images with their names, as Replicas has it; it blocks.
    """

    def __init__(self, elsewhere: Callable[[str, str, Collection[str]], Sequence[tuple[str, ImageRow]]]) -> None:
        self._elsewhere = elsewhere

    def methods(self) -> Mapping[str, Method]:
        """Return what is served."""
        return {"Related": Method(wire.RelatedRequest, self._answer)}

    async def _answer(self, request: wire.RelatedRequest, call: Call) -> wire.RelatedResponse:
        if not request.namespace or len(request.words) > MOST_WORDS:
            raise RpcError(Code.INVALID_ARGUMENT, f"a namespace and at most {MOST_WORDS} words are expected")
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


class RoomForShims:
    """Has a container wait for room on its GPUs: the answer is that it may start."""

    def __init__(self, room: Room) -> None:
        self._room = room

    def services(self) -> Services:
        """Return what is served."""
        return {ROOM: {"Take": Method(room_pb2.TakeRequest, self._take)}}

    async def _take(self, request: room_pb2.TakeRequest, call: Call) -> room_pb2.TakeResponse:
        taker = Taker(request.namespace, request.container, tuple(request.gpus))
        try:
            async with self._room.taken(taker, lambda reason: None):
                return room_pb2.TakeResponse()
        except Failure as error:
            raise RpcError(Code.FAILED_PRECONDITION, str(error)) from error
