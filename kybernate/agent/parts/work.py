"""What acts: operations, what measures them, the cluster whose pods ask for them, and the policy of the tiers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from kybernate.agent.inventory.node_facts import memory_message
from kybernate.agent.keeping.keeper import Keeper
from kybernate.agent.kubernetes.access import access_of
from kybernate.agent.kubernetes.cluster import Cluster
from kybernate.agent.live import limits_of
from kybernate.agent.missed import Missed
from kybernate.agent.operations.engine import Engine
from kybernate.agent.operations.execute import NodeExecutor
from kybernate.agent.part import Part, Work
from kybernate.agent.room import RoomOwner
from kybernate.agent.telemetry.ended import Ended
from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Invalid
from kybernate.verbs.model import Limits
from kybernate.verbs.node import Elsewhere, Movement, Node
from kybernate.verbs.room import Taker
from kybernate_shim.linux.process import boot_id

if TYPE_CHECKING:
    from kybernate.agent.assembly import Agent
    from kybernate.agent.settings import Settings


class Rooms(Part):
    """The owner of room on the node's GPUs. Seats give it their decision: `owner.grant`."""

    owner: RoomOwner

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self._agent = agent

    async def start(self) -> None:
        self.owner = RoomOwner(cast(Any, self._agent.events.log.note), self._show)

    def _show(self, taker: Taker, reason: str) -> None:
        self._agent.known.inventory.containers.set_waits((taker.namespace, taker.container), reason)


class Operations(Part):
    """The engine, and what hears of operations that have ended."""

    engine: Engine

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self._agent = agent
        self.ended = Ended([])

    async def start(self) -> None:
        agent, images, boot = self._agent, self._agent.images, boot_id()
        self._missed = Missed(agent.events.store, agent.known.inventory.containers, agent.log)
        for hear in (self._missed.ended, images.registrar.ended, images.parking.ended, images.uses.ended):
            self.ended.hear(hear)
        movement = Movement(images.tiers, images.turns, images.replicas, agent.store_settings, images.registrar.look_at)
        node = Node(
            str(agent.settings().containerd),
            boot=boot,
            gpus_of=agent.known.gpus_of,
            image_of=images.image_of,
            is_pinned=images.registry.is_pinned,
            ref_of=images.ref_of,
            tiers=images.tiers.names,
            elsewhere=self._elsewhere,
            pod_of=agent.cluster.probes,
            parked=images.parking.known,
            freed=images.parking.freed,
            in_flight=lambda namespace, id: agent.known.inventory.reports.of((namespace, id)).in_flight,
            movement=movement,
            arrivals=images.arrivals,
            room=agent.rooms.owner,
        )
        self.engine = Engine(
            agent.records.journal,
            NodeExecutor(node),
            events=cast(Any, agent.events.log),
            publish=self._publish,
            forget=agent.events.hub.remove,
            limits=self._limits,
            boot=boot,
        )

    def work(self) -> Iterable[Work]:
        yield self.engine.run()
        yield self._missed.run()

    async def reload(self, before: Settings) -> None:
        self.engine.wake()

    async def drain(self, seconds: float) -> None:
        """Wait for operations; those that still run then are continued by their shims."""
        left = await self.engine.drain(seconds)
        if left:
            names = [one.id for one in left]
            self._agent.log.info("operations.left", operations=names, state="shims continue them")

    def _limits(self) -> Limits:
        return limits_of(self._agent.settings().operations)

    def _elsewhere(self, name: str, stored: bool) -> Elsewhere | None:
        return self._agent.images.arrivals.find(name, stored=stored)

    def _publish(self, operation: wire.Operation) -> None:
        self._agent.events.hub.put(operation)
        self.ended(operation)


class Telemetry(Part):
    """Prometheus and OpenTelemetry, which are loaded where they are configured."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self._agent = agent

    async def start(self) -> None:
        """Raises Failure."""
        agent, settings = self._agent, self._agent.settings()
        if settings.metrics.listen:
            from kybernate.agent.telemetry.metrics import Metrics

            metrics = Metrics()
            scraping, _ = await metrics.serve(settings.metrics.listen, agent.events.hub)
            self.closing.push_async_callback(scraping.close)
            agent.operations.ended.hear(metrics.ended)
        if settings.tracing.endpoint:
            from kybernate.agent.telemetry.tracing import Tracing
            from kybernate.node.failure import Failure

            try:
                tracing = Tracing.to(settings.tracing.endpoint, agent.name)
            except Failure as error:
                agent.log.warning("tracing.refused", error=str(error), advice=error.advice)
            else:
                self.closing.push_async_callback(asyncio.to_thread, tracing.close)
                agent.operations.ended.hear(tracing.ended)


class InCluster(Part):
    """What acts in the cluster; nothing on a node that is in none, or where its API server cannot be called."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self._agent = agent
        self._cluster: Cluster | None = None

    async def start(self) -> None:
        agent, settings = self._agent, self._agent.settings().kubernetes
        try:
            access = access_of(settings.kubeconfig, os.environ)
        except Invalid as error:
            agent.log.error("kubernetes.not_configured", error=str(error), advice=error.advice)
            return
        if access is None:
            agent.log.info("kubernetes.not_used", state="no events appear on pods, and annotations ask for nothing")
            return
        self._cluster = Cluster(
            access,
            settings.node or os.environ.get("NODE_NAME", "") or agent.name,
            agent.operations.engine,
            agent.records.journal,
            agent.events.store,
            agent.known.inventory.containers,
            agent.events.hub,
            agent.config,
            lambda: agent.settings().kubernetes,
            agent.log,
        )
        self.closing.push_async_callback(self._cluster.close)
        agent.events.hear(self._cluster.offer)

    def work(self) -> Iterable[Work]:
        return self._cluster.parts() if self._cluster is not None else ()

    def probes(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        """Return what a pod's object says of its probes, None where the pod is not known."""
        return self._cluster.probes(namespace, name) if self._cluster is not None else None

    def annotation(self, namespace: str, name: str, key: str) -> str:
        """Return the value of a pod's annotation of ours, "" where it has none or is not known."""
        return self._cluster.annotation(namespace, name, key) if self._cluster is not None else ""

    def priority(self, namespace: str, name: str) -> int | None:
        """Return the priority of a pod's class, None where the pod is not known."""
        return self._cluster.priority(namespace, name) if self._cluster is not None else None


class Policy(Part):
    """Moves images between the tiers as the node's rules say."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self._agent = agent

    def work(self) -> Iterable[Work]:
        agent, images = self._agent, self._agent.images
        keeper = Keeper(
            agent.operations.engine,
            agent.events.hub,
            images.registry,
            images.tiers,
            images.uses,
            agent.tier_settings,
            self._memory,
            agent.name,
            agent.log,
        )
        yield keeper.run()

    def _memory(self) -> wire.HostMemory:
        return memory_message(self._agent.config())
