"""What shims ask of the agent about their own containers: no call of a shim gives it an image or a digest."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from kybernate.node.containerd import ContainerdRefused, ContainerdUnreachable
from kybernate_shim.messages import fetch_pb2 as wire
from kybernate_shim.ttrpc import Call, Code, Method, RpcError


class Described:
    """Answers shims. `image_of` returns a container's image, by containerd's namespace and id: reference and digest."""

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
