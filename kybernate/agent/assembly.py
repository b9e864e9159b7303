"""The agent's parts and how they are connected: who records, who publishes, who is asked."""

from __future__ import annotations

import asyncio
import os
import platform
import socket
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any, Final, cast

from kybernate.agent.access.caller import OwnContainer
from kybernate.agent.access.certificates import CertificatesUnusable
from kybernate.agent.events.containerd import ContainerdSink
from kybernate.agent.events.cursors import SCHEMA as HOOKS
from kybernate.agent.events.cursors import Cursors
from kybernate.agent.events.log import EventLog
from kybernate.agent.events.store import SCHEMA as EVENTS
from kybernate.agent.events.store import EventStore
from kybernate.agent.events.webhooks import HookRefused, Webhooks
from kybernate.agent.inventory.inventory import Inventory
from kybernate.agent.inventory.node_facts import memory_message
from kybernate.agent.journal import Journal, JournalUnusable
from kybernate.agent.keeping.keeper import Keeper
from kybernate.agent.keeping.parking import Parking
from kybernate.agent.keeping.uses import SCHEMA as USES
from kybernate.agent.keeping.uses import Uses
from kybernate.agent.kubernetes.access import AccessUnusable, access_of
from kybernate.agent.kubernetes.cluster import Cluster
from kybernate.agent.kubernetes.requests import SCHEMA as REQUESTS
from kybernate.agent.live import WebhookKeyUnusable, hooks_of, limits_of, own_findings
from kybernate.agent.operations.engine import Engine
from kybernate.agent.operations.execute import NodeExecutor
from kybernate.agent.operations.model import Copy, Evict
from kybernate.agent.operations.resolve import Node
from kybernate.agent.operations.store import SCHEMA as OPERATIONS
from kybernate.agent.operations.tier_verbs import TierVerbs
from kybernate.agent.peering import target_of_node
from kybernate.agent.registrar import Registrar, Registry
from kybernate.agent.sending.files import ImageFiles, Pace
from kybernate.agent.sending.leases import Leases
from kybernate.agent.service.checkpoints import Checkpoints
from kybernate.agent.service.described import Described
from kybernate.agent.service.fetches import SERVICE as IMAGES
from kybernate.agent.service.fetches import Fetches
from kybernate.agent.service.idle import Idleness
from kybernate.agent.service.inventory import Inventories
from kybernate.agent.service.operations import Operations
from kybernate.agent.service.own_container import Own
from kybernate.agent.service.peer_images import PeerImages
from kybernate.agent.service.quota import Quota
from kybernate.agent.service.related import Related
from kybernate.agent.serving import Servicers, Serving
from kybernate.agent.settings import LiveSettings, Settings
from kybernate.agent.storage.arrivals import LOOKUP_SECONDS, Arrivals
from kybernate.agent.storage.named import to_copy, to_evict
from kybernate.agent.storage.node_tiers import OBJECT, NodeTiers
from kybernate.agent.storage.replicas import Replicas
from kybernate.agent.storage.store_index import Indexed, index_store
from kybernate.agent.telemetry.ended import Ended
from kybernate.agent.watch.hub import Hub
from kybernate.messages import agent_pb2 as wire
from kybernate.node.containerd import ContainerdRefused, ContainerdUnreachable
from kybernate.node.containerd_async import AsyncContainerd
from kybernate.node.failure import Failure
from kybernate.node.naming import ImageAmbiguous
from kybernate.registry.location import registry_url
from kybernate.store.movement.turns import Turns
from kybernate.store.streaming.left import remove_all_left
from kybernate.store.streaming.memory import remove_left
from kybernate.store.tiers.peer import PeerTier
from kybernate.store.tiers.tier import Tier
from kybernate_shim.config import Config
from kybernate_shim.linux.process import boot_id
from kybernate_shim.live_config import LiveConfig

HEALTH_SECONDS: Final = 5.0
LOOP_SECONDS: Final = 5.0  # that a thread waits for the event loop


class Agent:
    """`open` makes the parts, `serve` opens the sockets once they know the node, `drain` lets clients go."""

    def __init__(self, live: LiveSettings, log: Any, given: Mapping[str, socket.socket]) -> None:
        self._live, self._log = live, log
        self._shim_config = LiveConfig(log)
        self._events: EventLog
        self._cluster: Cluster | None = None
        self._serving = Serving(self._settings, self._config, self._of_our_shims, log, given)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Sequence[Coroutine[Any, Any, None]]]:
        """Make all parts, and yield their work, which has to be done while the block runs.

        Raises JournalUnusable, MetricsUnavailable, HookRefused and WebhookKeyUnusable.
        """
        settings, self._loop = self._live.current, asyncio.get_running_loop()
        name = settings.node_name or platform.node()
        async with AsyncExitStack() as closing:
            schema = (*OPERATIONS, *EVENTS, *HOOKS, *USES, *REQUESTS)
            self.journal = Journal(settings.state_directory / "journal.db", schema)
            closing.callback(self.journal.close)
            containerd = await closing.enter_async_context(AsyncContainerd(str(settings.containerd)))
            self._described = Described(containerd.image_of)
            sink = ContainerdSink(containerd, self._log)
            await self._open_events(closing, name, sink)
            self._inventory = Inventory(
                containerd, self._hub, cast(Any, self._events.note), self._log, name=name, config=self._config
            )
            self._registry = Registry(settings.registry or registry_url(), name)
            closing.callback(self._registry.close)
            self._registrar = Registrar(
                self._registry, self._hub, self._config, self._log, changed=self._inventory.tiers.images_changed
            )
            self._tiers = NodeTiers(
                self._config,
                lambda: self._settings().store,
                lambda: self._settings().tiers,
                settings.state_directory,
                self._peer,
            )
            closing.callback(self._tiers.close)
            self._replicas = Replicas(self._registry, self._config, self._look_soon, lambda: self._settings().store.url)
            self._related = Related(self._replicas.elsewhere)
            self._parking = Parking(self._registry, str(settings.containerd), self._log)
            self._uses = Uses(self.journal, self._owner_of, self._log)
            await self._open_telemetry(closing, name)
            self._leases = Leases(self._log)
            await asyncio.to_thread(self._remove_left)
            self._engine = self._open_engine()
            closing.push_async_callback(self._fetches.close)
            self._cluster = await self._open_cluster(closing, name)
            yield (
                *(self._cluster.parts() if self._cluster is not None else ()),
                self._keeper(name).run(),
                self._engine.run(),
                self._inventory.run(),
                sink.run(),
                self._registrar.run(),
                self._look_at_store(),
                self._leases.run(),
                self._watch_health(containerd),
            )

    async def serve(self) -> None:
        """Open the sockets, once the operations of the journal are known."""
        await self._engine.ready()
        self._idleness = Idleness()
        peers = self._settings().peers
        quota = Quota(lambda: self._settings().self_socket.quota)
        own = Own(
            self._engine,
            self._find,
            lambda: self._config().checkpoint_root,
            quota,
            self._idleness,
            lambda own: self._inventory.gpus.activity((own.namespace, own.id)),
        )
        await self._serving.start(
            Servicers(
                Inventories(self._inventory, self._hub, lambda: own_findings(self._live)),
                Operations(self._engine, self._parking),
                Checkpoints(self._registry, self._engine, self._hub.put, self._replicas.look_for),
                own,
                PeerImages(self._registry, self._leases),
                ImageFiles(self._leases, peers.reads, Pace(lambda: self._settings().peers.bytes_per_second)),
                {IMAGES: {**self._fetches.services()[IMAGES], **self._described.methods(), **self._related.methods()}},
            )
        )

    async def reload(self) -> None:
        """Read the settings again; what cannot be used is in the log, an event and the node's findings."""
        before = self._live.current
        self._live.reload()
        if self._live.problem:
            self._log.error("settings.not_used", error=self._live.problem, state="the former settings stay in use")
            self._events.note("settings.refused", "error", self._live.problem)
            return
        for warning in self._live.current.warnings:
            self._log.warning("settings.ignored", warning=warning)
        if self._live.pending:
            self._log.warning("settings.deferred", keys=self._live.pending, advice="restart the agent")
        self._log.info("settings.reloaded")
        self._engine.wake()
        await self._apply(before)
        self._events.note(
            "settings.changed", "info", f"{self._live.path} was read", pending=", ".join(self._live.pending)
        )

    async def drain(self, seconds: float) -> None:
        """Take no more requests, wait so long for operations, and let all clients go. Shims keep running."""
        await self._serving.ready(False)
        if idleness := getattr(self, "_idleness", None):
            idleness.stop()
        left = await self._engine.drain(seconds)
        if left:
            self._log.info("operations.left", operations=[one.id for one in left], state="shims continue them")
        self._hub.close()
        await self._serving.stop()

    # ---- parts

    async def _open_events(self, closing: AsyncExitStack, name: str, sink: ContainerdSink) -> None:
        store = EventStore(self.journal)
        self._hub = Hub(store)
        self._webhooks = Webhooks(store, Cursors(self.journal), name, self._log)
        closing.push_async_callback(self._webhooks.close)
        sinks = (
            self._hub.put,
            self._webhooks.wake,
            sink.offer,
            lambda event: self._registrar.heard(event),
            lambda event: self._cluster.offer(event) if self._cluster is not None else None,
        )
        self._events = EventLog(store, sinks, self._log)
        closing.push_async_callback(self._events.close)
        await self._webhooks.configure(hooks_of(self._live.current.webhooks))

    async def _open_telemetry(self, closing: AsyncExitStack, name: str) -> None:
        """Prometheus and OpenTelemetry are loaded where they are configured."""
        settings = self._live.current
        hears = [self._registrar.ended, self._parking.ended, self._uses.ended]
        if settings.metrics.listen:
            from kybernate.agent.telemetry.metrics import Metrics

            metrics = Metrics()
            scraping, _ = await metrics.serve(settings.metrics.listen, self._hub)
            closing.push_async_callback(scraping.close)
            hears.append(metrics.ended)
        if settings.tracing.endpoint:
            from kybernate.agent.telemetry.tracing import Tracing, TracingUnavailable

            try:
                tracing = Tracing.to(settings.tracing.endpoint, name)
            except TracingUnavailable as error:
                self._log.warning("tracing.refused", error=str(error), advice=error.advice)
            else:
                closing.push_async_callback(asyncio.to_thread, tracing.close)
                hears.append(tracing.ended)
        self._ended = Ended(hears)

    def _open_engine(self) -> Engine:
        boot, turns = boot_id(), Turns()
        arrivals = Arrivals(self._tiers, self._replicas, turns, lambda: self._settings().store)
        self._fetches = Fetches(
            arrivals,
            self._config,
            lambda: (self._tiers.local()[-1], self._settings().tiers.disk.high),
            self._registrar.look_at,
            self._log,
        )
        node = Node(
            str(self._settings().containerd),
            boot=boot,
            gpus_of=self._gpus_of,
            image_of=self._image_of,
            is_pinned=self._registry.is_pinned,
            ref_of=self._ref_of,
            tiers=self._tiers.names,
            elsewhere=lambda name, stored: arrivals.find(name, stored=stored),
            pod_of=lambda namespace, name: self._cluster.probes(namespace, name) if self._cluster else None,
        )
        verbs = TierVerbs(self._tiers, turns, self._replicas, lambda: self._settings().store, self._registrar.look_at)
        return Engine(
            self.journal,
            NodeExecutor(node, verbs, arrivals),
            events=cast(Any, self._events),
            publish=self._publish,
            forget=self._hub.remove,
            limits=lambda: limits_of(self._settings().operations),
            boot=boot,
        )

    async def _open_cluster(self, closing: AsyncExitStack, name: str) -> Cluster | None:
        """Return what acts in the cluster, None on a node that is in none, or where its API server cannot be called."""
        settings = self._live.current.kubernetes
        try:
            access = access_of(settings.kubeconfig, os.environ)
        except AccessUnusable as error:
            self._log.error("kubernetes.not_configured", error=str(error), advice=error.advice)
            return None
        if access is None:
            self._log.info("kubernetes.not_used", state="no events appear on pods, and annotations ask for nothing")
            return None
        cluster = Cluster(
            access,
            settings.node or os.environ.get("NODE_NAME", "") or name,
            self._engine,
            self.journal,
            self._inventory.containers,
            self._hub,
            self._config,
            lambda: self._settings().kubernetes,
            self._log,
        )
        closing.push_async_callback(cluster.close)
        return cluster

    def _remove_left(self) -> None:
        """Remove what an agent that was killed has left of images that arrived."""
        remove_left()
        for directory in remove_all_left(self._config().checkpoint_root):
            self._log.warning("image.not_fetched", path=str(directory), error="the agent that brought it was killed")

    def _keeper(self, node: str) -> Keeper:
        return Keeper(
            self._engine,
            self._hub,
            self._registry,
            self._tiers,
            self._uses,
            lambda: self._settings().tiers,
            lambda: memory_message(self._config()),
            node,
            self._log,
        )

    async def _apply(self, before: Settings) -> None:
        """Give parts that keep a copy of settings the current ones."""
        now = self._live.current
        try:
            if now.webhooks != before.webhooks or now.webhooks.key:
                await self._webhooks.configure(hooks_of(now.webhooks))
            self._serving.refresh()
        except (CertificatesUnusable, WebhookKeyUnusable, HookRefused, JournalUnusable) as error:
            self._log.error("settings.not_applied", error=str(error), advice=error.advice)
            self._events.note("settings.refused", "error", str(error))

    async def _look_at_store(self) -> None:
        """Take over what other nodes put into the object store, and remove from it."""
        while True:
            if self._settings().store.url:
                await self._registrar.look_at_store(self._indexed)
            await asyncio.sleep(max(1.0, self._settings().store.look_seconds))

    async def _indexed(self) -> Indexed:
        return await index_store(await self._tiers.object(), self._replicas)

    async def _watch_health(self, containerd: AsyncContainerd) -> None:
        """Let the health service say whether operations are known and containerd answers."""
        await self._engine.ready()
        await self._inventory.containers.ready.wait()
        while True:
            try:
                await containerd.version()
            except (ContainerdUnreachable, ContainerdRefused):
                await self._serving.ready(False)
            else:
                await self._serving.ready(True)
            await asyncio.sleep(HEALTH_SECONDS)

    # ---- what the parts ask of each other

    def _settings(self) -> Settings:
        return self._live.current

    def _config(self) -> Config:
        return self._shim_config.read()

    def _peer(self, node: str) -> Tier:
        return PeerTier(node, target_of_node(node, self._settings()), self._config())

    def _publish(self, operation: wire.Operation) -> None:
        self._hub.put(operation)
        self._ended(operation)

    def _of_our_shims(self) -> list[wire.Container]:
        return [one for one in self._hub.objects("container") if one.state and not one.foreign]

    def _find(self, own: OwnContainer) -> wire.Container | None:
        found: wire.Container | None = self._hub.get("container", f"{own.namespace}/{own.id}")
        return found

    def _owner_of(self, operation: wire.Operation) -> str:
        """Return NAMESPACE/WORKLOAD of what an operation was about, "" where it has none."""
        row = self._registry().get(operation.image) if operation.image else None
        if row is not None:
            return f"{row.source.namespace}/{row.workload}" if row.workload else ""
        known: wire.Container | None = self._hub.get("container", f"{operation.namespace}/{operation.container}")
        return f"{known.pod_namespace}/{known.workload}" if known and known.workload else ""

    def _image_of(self, name: str) -> Path | None:
        """Return the directory that a name means here; None without a registry that answers: then the disk decides."""
        try:
            return self._replicas.image_of(name)
        except ImageAmbiguous:
            raise
        except Failure:
            return None

    def _ref_of(self, wanted: Copy | Evict) -> tuple[str, str, str]:
        """Return which image is moved by a request."""
        if wanted.tier == OBJECT and isinstance(wanted, Evict):  # others put images there, and remove them
            looking = self._registrar.look_at_store(self._indexed)
            asyncio.run_coroutine_threadsafe(looking, self._loop).result(LOOKUP_SECONDS)
        copies = self._replicas.copies_of(wanted.image)
        if isinstance(wanted, Evict):
            return astuple(to_evict(wanted.image, wanted.tier, copies))
        return astuple(to_copy(wanted.image, wanted.tier, self._tiers.names(), copies, demote=wanted.demote))

    def _look_soon(self, directory: Path) -> None:
        """Have watchers hear of an image that a thread has found."""
        self._loop.call_soon_threadsafe(self._registrar.look_at, directory)

    def _gpus_of(self, id: str) -> Sequence[str]:
        """Return the GPUs of a container; asked from threads, and the hub is the event loop's."""

        async def look() -> Sequence[str]:
            found = (one.gpu_uuids for one in self._hub.objects("container") if one.id == id)
            return tuple(next(found, ()))

        return asyncio.run_coroutine_threadsafe(look(), self._loop).result(LOOP_SECONDS)
