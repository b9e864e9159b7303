"""What shims ask of the owner of room on GPUs, before a container starts."""

from __future__ import annotations

from typing import Final

from kybernate.node.failure import Failure
from kybernate.verbs.room import Room, Taker
from kybernate_shim.messages import room_pb2 as wire
from kybernate_shim.ttrpc import Call, Code, Method, RpcError, Services

SERVICE: Final = "kybernate.room.v1.Room"


class RoomForShims:
    """Answers shims: the answer is that the container may start."""

    def __init__(self, room: Room) -> None:
        self._room = room

    def services(self) -> Services:
        """Return what is served."""
        return {SERVICE: {"Take": Method(wire.TakeRequest, self._take)}}

    async def _take(self, request: wire.TakeRequest, call: Call) -> wire.TakeResponse:
        taker = Taker(request.namespace, request.container, tuple(request.gpus))
        try:
            async with self._room.taken(taker, lambda reason: None):
                return wire.TakeResponse()
        except Failure as error:
            raise RpcError(Code.FAILED_PRECONDITION, str(error)) from error
