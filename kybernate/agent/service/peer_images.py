"""The service of images for the agents of other nodes: opens and describes them; the bytes go by HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration

from kybernate.agent.access.caller import CALLER
from kybernate.agent.sending.leases import LASTS_SECONDS, Leases
from kybernate.agent.sending.opened import IMAGE_UNREADABLE_ADVICE, Extent, OpenedImage
from kybernate.messages import peer_pb2 as wire
from kybernate.messages.peer_pb2_grpc import PeersServicer
from kybernate.node.failure import Failure
from kybernate.registry.catalogue import Catalogue
from kybernate.registry.model import RegisteredCopy, Replica
from kybernate_shim.checkpoint.image.locate import NAME

LASTS: Final = Duration(seconds=int(LASTS_SECONDS))


class PeerImages(PeersServicer):
    """`catalogue` may block, and is asked in a thread, as files are."""

    def __init__(self, catalogue: Callable[[], Catalogue], leases: Leases) -> None:
        self._catalogue = catalogue
        self._leases = leases

    async def OpenImage(self, request: wire.OpenImageRequest, context: Any) -> wire.OpenedImage:
        replica = await asyncio.to_thread(self._replica, request.image)
        image = await asyncio.to_thread(OpenedImage.of, Path(replica.place))
        try:
            lease = self._leases.add(image, CALLER.get().key)
        except BaseException:
            image.close()
            raise
        try:
            holes = await asyncio.to_thread(image.holes)
        except BaseException:
            self._leases.end(lease.token, lease.caller)
            raise
        return _described(lease.token, replica, image, holes)

    async def CloseImage(self, request: wire.CloseImageRequest, context: Any) -> wire.CloseImageResponse:
        self._leases.end(request.token, CALLER.get().key)
        return wire.CloseImageResponse()

    def _replica(self, name: str) -> Replica:
        """Return the replica of an image on this node. Raises Failure, and what the registry does."""
        catalogue = self._catalogue()
        row = catalogue.get(name)
        here = [copy for copy in catalogue.copies(name) if copy.row.key == row.key and _is_of(copy, catalogue.node)]
        whole = [copy.replica for copy in here if copy.replica.state == "complete"]
        if not whole:
            raise Failure(
                f"this node has no complete copy of image {name}",
                state="nothing was opened",
                advice=IMAGE_UNREADABLE_ADVICE,
            )
        return whole[0]


def _is_of(copy: RegisteredCopy, node: str) -> bool:
    return copy.replica.node == node and copy.replica.place.startswith("/")


def _described(token: str, replica: Replica, image: OpenedImage, holes: list[list[Extent]]) -> wire.OpenedImage:
    name = replica.name if NAME.fullmatch(replica.name) else image.directory.name
    files = [
        wire.ImageFile(
            name=file.name,
            size=file.size,
            digest=file.digest,
            holes=[wire.Extent(offset=offset, size=size) for offset, size in found],
        )
        for file, found in zip(image.files, holes, strict=True)
    ]
    return wire.OpenedImage(token=token, name=name, manifest=image.content, files=files, lasts=LASTS)
