"""The service of activity: what a proxy knows of the use of containers."""

from __future__ import annotations

from typing import Any

from kybernate.agent.access.caller import CALLER
from kybernate.agent.inventory.containers import Key
from kybernate.agent.inventory.inventory import Inventory
from kybernate.messages import agent_pb2 as wire
from kybernate.messages.agent_pb2_grpc import ActivityServicer
from kybernate.node.failure import Invalid


class Activity(ActivityServicer):
    """Notes reports in the inventory."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory

    async def ReportActivity(self, request: wire.ReportActivityRequest, context: Any) -> wire.ReportActivityResponse:
        keys = self._keys(request)
        seconds = request.lasts.ToTimedelta().total_seconds()
        if seconds < 0:
            raise Invalid("lasts is negative", state="nothing was noted")
        self._inventory.reports.report(CALLER.get().key, keys, request.in_flight, seconds)
        return wire.ReportActivityResponse(containers=len(keys))

    def _keys(self, request: wire.ReportActivityRequest) -> list[Key]:
        """Return the containers that a report is about. Raises Missing, Ambiguous, Invalid."""
        match request.WhichOneof("of"):
            case "container":
                found = self._inventory.find(request.container, request.namespace)
                return [(found.namespace, found.id)]
            case "workload":
                live = (one for one in self._inventory.list() if not one.sandbox)
                return [
                    (one.namespace, one.id) for one in live if f"{one.pod_namespace}/{one.workload}" == request.workload
                ]
        raise Invalid("neither container nor workload is given", state="nothing was noted")
