"""The node's images: the registry, the tiers they are in, and the object store that nodes share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING

from kybernate.agent.keeping.parking import Parking
from kybernate.agent.keeping.uses import Uses
from kybernate.agent.part import Part, Work
from kybernate.agent.peering import target_of_node
from kybernate.agent.registrar import Registrar, Registry
from kybernate.agent.sending.leases import Leases
from kybernate.agent.service.fetches import Fetches
from kybernate.agent.storage.arrivals import LOOKUP_SECONDS, Arrivals
from kybernate.agent.storage.named import to_copy, to_evict
from kybernate.agent.storage.node_tiers import OBJECT, NodeTiers
from kybernate.agent.storage.replicas import Replicas
from kybernate.agent.storage.store_index import Indexed, index_store
from kybernate.agent.storage.store_service import StoreService
from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Ambiguous, Failure
from kybernate.registry.location import registry_url
from kybernate.store.movement.turns import Turns
from kybernate.store.streaming.left import remove_all_left
from kybernate.store.streaming.memory import remove_left
from kybernate.store.tiers.peer import PeerTier
from kybernate.store.tiers.tier import Tier
from kybernate.verbs.copy import Copy
from kybernate.verbs.evict import Evict
from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.parked import clear
from kybernate_shim.errors import Refused
from kybernate_shim.trust.places import require_private

if TYPE_CHECKING:
    from kybernate.agent.assembly import Agent


class Images(Part):
    """What the node knows of its images."""

    registry: Registry
    registrar: Registrar
    tiers: NodeTiers
    replicas: Replicas
    parking: Parking
    uses: Uses
    arrivals: Arrivals
    fetches: Fetches

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self._agent = agent
        self.turns = Turns()

    async def start(self) -> None:
        agent, settings = self._agent, self._agent.settings()
        self.registry = Registry(settings.registry or registry_url(), agent.name)
        self.closing.callback(self.registry.close)
        changed = agent.known.inventory.tiers.images_changed
        self.registrar = Registrar(self.registry, agent.events.hub, agent.config, agent.log, changed=changed)
        agent.events.hear(self.registrar.heard)
        self.tiers = NodeTiers(
            agent.config, agent.store_settings, agent.tier_settings, settings.state_directory, self._peer
        )
        self.closing.callback(self.tiers.close)
        self._service = StoreService(self.tiers, agent.store_settings, agent.log)
        self.replicas = Replicas(self.registry, agent.config, self._look_soon, lambda: agent.store_settings().url)
        self.parking = Parking(self.registry, str(settings.containerd), agent.log)
        self.uses = Uses(agent.records.journal, self._owner_of, agent.log)
        self.leases = Leases(agent.log)
        await asyncio.to_thread(self._remove_left)
        self.arrivals = Arrivals(self.tiers, self.replicas, self.turns, agent.store_settings)
        self.fetches = Fetches(self.arrivals, agent.config, self._disk, self.registrar.look_at, agent.log)
        self.closing.push_async_callback(self.fetches.close)

    def work(self) -> Iterable[Work]:
        yield self.registrar.run()
        yield self._look_at_store()
        yield self.leases.run()

    def image_of(self, name: str) -> Path | None:
        """Return the directory that a name means here; None without a registry that answers: then the disk decides."""
        try:
            return self.replicas.image_of(name)
        except Ambiguous:
            raise
        except Failure:
            return None

    def ref_of(self, wanted: Copy | Evict) -> tuple[str, str, str]:
        """Return which image is moved by a request: namespace, name and id. For threads."""
        if wanted.tier == OBJECT and isinstance(wanted, Evict):  # other nodes put images there, and remove them
            looking = self.registrar.look_at_store(self._indexed)
            asyncio.run_coroutine_threadsafe(looking, self._agent.loop).result(LOOKUP_SECONDS)
        copies = self.replicas.copies_of(wanted.image)
        if isinstance(wanted, Evict):
            return astuple(to_evict(wanted.image, wanted.tier, copies))
        return astuple(to_copy(wanted.image, wanted.tier, self.tiers.names(), copies, demote=wanted.demote))

    def _disk(self) -> tuple[Tier, float]:
        """Return the tier that images arrive in, and the share of it above which none does."""
        return self.tiers.local()[-1], self._agent.tier_settings().disk.high

    def _peer(self, node: str) -> Tier:
        return PeerTier(node, target_of_node(node, self._agent.settings()), self._agent.config())

    def _look_soon(self, directory: Path) -> None:
        """Register an image that a thread has found."""
        self._agent.loop.call_soon_threadsafe(self.registrar.look_at, directory)

    def _owner_of(self, operation: wire.Operation) -> str:
        """Return NAMESPACE/WORKLOAD of what an operation was about, "" where it has none."""
        row = self.registry().get(operation.image) if operation.image else None
        if row is not None:
            return f"{row.source.namespace}/{row.workload}" if row.workload else ""
        key = f"{operation.namespace}/{operation.container}"
        known: wire.Container | None = self._agent.events.hub.get("container", key)
        return f"{known.pod_namespace}/{known.workload}" if known and known.workload else ""

    def _remove_left(self) -> None:
        """Remove what an agent that was killed has left of images that arrived, and shims of what was parked."""
        config, log = self._agent.config(), self._agent.log
        remove_left()
        for directory in remove_all_left(config.checkpoint_root):
            log.warning("image.not_fetched", path=str(directory), error="the agent that brought it was killed")
        try:
            require_private(config.parking_root)
            clear(config.parking_root, Memory(0))
        except FileNotFoundError:
            pass
        except (Refused, OSError) as error:
            log.warning("parked.not_cleared", path=str(config.parking_root), error=str(error))

    async def _look_at_store(self) -> None:
        """Take over what other nodes put into the object store, and remove from it."""
        while True:
            if self._agent.store_settings().url:
                await self.registrar.look_at_store(self._indexed)
                await self._service.look()
            await asyncio.sleep(max(1.0, self._agent.store_settings().look_seconds))

    async def _indexed(self) -> Indexed:
        return await index_store(await self.tiers.object(), self.replicas)
