"""The agent's inventory and hub as a program with a socket: `python -m tests.system.small_agent DIRECTORY`.

Its socket and journal are in the directory.
"""

# ruff: noqa: N802  (methods of a service are named as its calls)

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import structlog

from kybernate.agent.events.containerd import ContainerdSink
from kybernate.agent.events.log import EventLog
from kybernate.agent.events.store import SCHEMA, EventStore
from kybernate.agent.inventory.inventory import Inventory
from kybernate.agent.journal import Journal
from kybernate.agent.watch.hub import Hub
from kybernate.messages import agent_pb2 as api
from kybernate.messages import agent_pb2_grpc
from kybernate.node.containerd_async import AsyncContainerd
from kybernate_shim.config import Config


class Service(agent_pb2_grpc.InventoryServicer):
    def __init__(self, inventory: Inventory, hub: Hub) -> None:
        self._inventory, self._hub = inventory, hub

    async def GetNode(self, request: Any, context: Any) -> api.Node:
        return await self._inventory.node()

    async def ListContainers(self, request: Any, context: Any) -> api.ListContainersResponse:
        await self._inventory.containers.ready.wait()
        found = self._inventory.list(request.namespace, all=request.all)
        return api.ListContainersResponse(containers=found, revision=self._hub.revision)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[api.Change]:
        async with aclosing(self._hub.subscribe(request.revision, request.instance, request.kinds)) as changes:
            async for change in changes:
                yield change


async def main(directory: Path) -> None:
    journal = Journal(directory / "journal.db", SCHEMA)
    store = EventStore(journal)
    hub = Hub(store)
    log = structlog.get_logger()
    async with AsyncContainerd() as containerd:
        sink = ContainerdSink(containerd, log)
        events = EventLog(store, [hub.put, sink.offer], log)
        inventory = Inventory(containerd, hub, events.note, log, name="node-1", config=Config.load)
        server = grpc.aio.server()
        agent_pb2_grpc.add_InventoryServicer_to_server(Service(inventory, hub), server)  # type: ignore[no-untyped-call]
        server.add_insecure_port(f"unix:{directory}/agent.sock")
        await server.start()
        tasks = [asyncio.create_task(sink.run()), asyncio.create_task(inventory.run())]
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
        stopped = asyncio.create_task(ended.wait())
        await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
            task.cancel()
        hub.close()
        await events.close()
        await server.stop(1)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
