"""The service of checkpoint images: the registry answers, and what touches files is an operation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from kybernate.agent.operations.engine import Engine
from kybernate.agent.service.images import filter_of, image_message, list_message
from kybernate.messages import agent_pb2 as wire
from kybernate.messages.agent_pb2_grpc import CheckpointsServicer
from kybernate.registry.catalogue import Catalogue
from kybernate.registry.model import ImageRow

T = TypeVar("T")


class Checkpoints(CheckpointsServicer):
    """`catalogue` may block, and is asked in a thread. `publish` gets each image that was pinned or labelled.

    `look_for` registers what lies on the node under a name, so that an image is known as soon as it is named.
    """

    def __init__(
        self,
        catalogue: Callable[[], Catalogue],
        engine: Engine,
        publish: Callable[[wire.Image], object],
        look_for: Callable[[str], object] = lambda name: None,
    ) -> None:
        self._catalogue = catalogue
        self.engine = engine
        self._publish = publish
        self._look_for = look_for

    async def ListImages(self, request: wire.ListImagesRequest, context: Any) -> wire.ListImagesResponse:
        wanted, limit, token = filter_of(request), request.limit, request.page_token
        return list_message(await self._asked(lambda registry: registry.list(wanted, limit=limit, token=token)))

    async def GetImage(self, request: wire.GetImageRequest, context: Any) -> wire.Image:
        return await self._named(request.image, lambda registry: registry.get(request.image))

    async def PinImage(self, request: wire.PinImageRequest, context: Any) -> wire.Image:
        name = request.image
        return await self._named(name, lambda registry: registry.pin(name, request.pinned), changes=True)

    async def LabelImage(self, request: wire.LabelImageRequest, context: Any) -> wire.Image:
        labels, removed = dict(request.labels), list(request.removed)
        name = request.image
        return await self._named(name, lambda registry: registry.label(name, labels, removed), changes=True)

    async def _asked(self, ask: Callable[[Catalogue], T]) -> T:
        return await asyncio.to_thread(lambda: ask(self._catalogue()))

    async def _named(self, name: str, ask: Callable[[Catalogue], ImageRow], *, changes: bool = False) -> wire.Image:
        """Answer with an image, under the name of the copy that was named."""

        def work(registry: Catalogue) -> ImageRow:
            self._look_for(name)
            return ask(registry)

        row = await self._asked(work)
        if changes:
            self._publish(image_message(row))
        return image_message(row, name)
