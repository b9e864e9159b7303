"""The service of seats: what the arbiter knows of them, and what it will do next."""

from __future__ import annotations

from typing import Any

from kybernate.agent.inventory.inventory import Inventory
from kybernate.agent.seats.messages import schedule_of
from kybernate.agent.watch.hub import Hub
from kybernate.messages import agent_pb2 as wire
from kybernate.messages.agent_pb2_grpc import SeatsServicer
from kybernate.node.failure import Missing

WITHOUT = "this node has no seats"
ADVICE = "set `seats.file` in agent.toml; docs/seats.md describes it"


class Seats(SeatsServicer):
    """Answers from the hub, where the arbiter publishes each change."""

    def __init__(self, inventory: Inventory, hub: Hub) -> None:
        self._inventory, self._hub = inventory, hub

    async def ListSeats(self, request: wire.ListSeatsRequest, context: Any) -> wire.ListSeatsResponse:
        found = [one for one in self._seats() if request.all or one.container]
        return wire.ListSeatsResponse(seats=found, revision=self._hub.revision)

    async def GetSeat(self, request: wire.GetSeatRequest, context: Any) -> wire.Seat:
        seats = self._seats()
        named = [one for one in seats if one.name == request.name and not request.namespace]
        if named:
            return named[0]
        container = self._inventory.find(request.name, request.namespace)
        for one in seats:
            if (one.namespace, one.container) == (container.namespace, container.id):
                return one
        if not seats:
            raise Missing(WITHOUT, advice=ADVICE)
        raise Missing(
            f"container {container.title} has no seat",
            advice="a pod asks for one by a resource's limit, another container by the annotation kybernate.io/seat",
        )

    async def GetSchedule(self, request: wire.GetScheduleRequest, context: Any) -> wire.Schedule:
        return schedule_of(self._seats())

    def _seats(self) -> list[wire.Seat]:
        return sorted(self._hub.objects("seat"), key=lambda one: (one.gpus[:1], one.group, len(one.name), one.name))
