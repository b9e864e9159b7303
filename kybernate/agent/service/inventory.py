"""The service of the inventory: what the agent knows, and a stream of its changes; the output of containers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from typing import Any

from kybernate.agent.inventory.inventory import Inventory
from kybernate.agent.service.logs import Logs
from kybernate.agent.watch.hub import Hub
from kybernate.messages import agent_pb2 as wire
from kybernate.messages.agent_pb2_grpc import InventoryServicer


class Inventories(InventoryServicer):
    """`findings` are the agent's own, in addition to those of the node."""

    def __init__(
        self, inventory: Inventory, hub: Hub, findings: Callable[[], Iterable[wire.Finding]], logs: Logs
    ) -> None:
        self._inventory, self._logs = inventory, logs
        self._hub = hub
        self._findings = findings

    async def GetNode(self, request: wire.GetNodeRequest, context: Any) -> wire.Node:
        node = await self._inventory.node()
        node.findings.extend(self._findings())
        return node

    async def ListContainers(self, request: wire.ListContainersRequest, context: Any) -> wire.ListContainersResponse:
        found = self._inventory.list(request.namespace, all=request.all)
        return wire.ListContainersResponse(containers=found, revision=self._hub.revision)

    async def GetContainer(self, request: wire.GetContainerRequest, context: Any) -> wire.Container:
        return self._inventory.find(request.name, request.namespace)

    async def Watch(self, request: wire.WatchRequest, context: Any) -> AsyncIterator[wire.Change]:
        following = self._hub.subscribe(request.revision, request.instance, request.kinds)
        async with aclosing(following) as changes:
            async for change in changes:
                yield change

    async def ReadLog(self, request: wire.ReadLogRequest, context: Any) -> AsyncIterator[wire.LogLines]:
        container = self._inventory.find(request.name, request.namespace)
        async with aclosing(self._logs.read(container, request.lines, follow=request.follow)) as found:
            async for lines in found:
                yield lines
