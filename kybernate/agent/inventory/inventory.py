"""All that the agent knows of its node, assembled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kybernate.agent.inventory.activity import InUse, Reports
from kybernate.agent.inventory.containers import Containers, Key, Note
from kybernate.agent.inventory.gpus import Activity, Gpus
from kybernate.agent.inventory.node_facts import NodeFacts, memory_message
from kybernate.agent.inventory.tiers import Look, Tiers, usage_by_root
from kybernate.agent.watch.hub import Hub
from kybernate.messages import agent_pb2 as api
from kybernate.node.containerd_async import AsyncContainerd
from kybernate.node.lookup import resolve
from kybernate_shim.config import Config

if TYPE_CHECKING:
    from kybernate_shim.logs import Log

EXPIRE_SECONDS = 1.0  # between two looks at reports of activity that have ended


class Inventory:
    """The parts, which keep the hub up to date while `run` runs; `containers.ready` is set once all is known."""

    def __init__(
        self,
        containerd: AsyncContainerd,
        hub: Hub,
        note: Note,
        log: Log,
        *,
        name: str,
        config: Callable[[], Config],
        images: Look = usage_by_root,
    ) -> None:
        """`name` is the node's; `config` returns the shims' configuration as it is now."""
        self.name = name
        self.containers = Containers(containerd, hub, note, log)
        self.reports = Reports(self._in_use, time.time)
        self.gpus = Gpus(hub, self.containers.pids, self.containers.set_gpus)
        self.tiers = Tiers(hub, config, look=images)
        self.facts = NodeFacts(containerd.version, config)
        self._hub, self._config = hub, config
        self._started_ns = time.time_ns()

    async def run(self) -> None:
        """Keep everything up to date until this is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for part in (self.containers, self.gpus, self.tiers, self.facts):
                tasks.create_task(part.run())
            tasks.create_task(self._expire())

    async def activity(self, key: Key) -> Activity:
        """Return what a container does, by the work of its processes on GPUs and by what others report."""
        on_gpus = await self.gpus.activity(key)
        return Activity(on_gpus.mark + self.reports.mark(key), on_gpus.unknown)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_SECONDS)
            self.reports.expire(self.containers.pids())

    def _in_use(self, key: Key, use: InUse) -> None:
        self.containers.set_use(key, use.in_flight, use.until)

    async def node(self) -> api.Node:
        """Return the node as it is now; GPUs are not older than a second."""
        await asyncio.gather(self.gpus.refresh(), self.tiers.refresh())
        node = api.Node(name=self.name, instance=self._hub.instance)
        node.started.FromNanoseconds(self._started_ns)
        node.gpus.extend(sorted(self._hub.objects("gpu"), key=lambda gpu: (gpu.index, gpu.uuid)))
        node.tiers.extend(self._hub.objects("tier"))
        node.memory.CopyFrom(await asyncio.to_thread(memory_message, self._config()))
        facts = self.facts.current
        node.versions.update(facts.versions | ({"driver": self.gpus.driver} if self.gpus.driver else {}))
        node.findings.extend(facts.findings)
        return node

    def list(self, namespace: str = "", *, all: bool = False) -> list[api.Container]:
        """Return containers sorted by name; with `all`, those of other shims, and those without a task, too."""
        found = [
            one
            for one in self._hub.objects("container")
            if namespace in ("", one.namespace) and (all or (one.state != api.Container.NO_TASK and not one.foreign))
        ]
        return sorted(found, key=lambda one: (one.namespace, one.title, one.id))

    def find(self, name: str, namespace: str = "") -> api.Container:
        """Return the container that a name means, see `resolve`. Raises Missing and Ambiguous."""
        found = resolve(name, self.containers.known(namespace))
        message: api.Container = self._hub.get("container", f"{found.namespace}/{found.id}")
        return message
