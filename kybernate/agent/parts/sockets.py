"""What clients reach: the services, on all sockets, and whether the agent is ready for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from kybernate.agent.access.caller import OwnContainer
from kybernate.agent.inventory.gpus import Activity
from kybernate.agent.live import own_findings
from kybernate.agent.part import Part, Work
from kybernate.agent.sending.files import ImageFiles, Pace
from kybernate.agent.service.activity import Activity as ActivityService
from kybernate.agent.service.checkpoints import Checkpoints
from kybernate.agent.service.fetches import SERVICE as IMAGES
from kybernate.agent.service.for_shims import Described, Related, RoomForShims
from kybernate.agent.service.idle import Idleness
from kybernate.agent.service.inventory import Inventories
from kybernate.agent.service.logs import Logs
from kybernate.agent.service.operations import Operations, with_verbs
from kybernate.agent.service.own_container import Own
from kybernate.agent.service.peer_images import PeerImages
from kybernate.agent.service.quota import Quota
from kybernate.agent.service.seats import Seats as SeatsService
from kybernate.agent.serving import Servicers, Serving
from kybernate.messages import agent_pb2 as wire
from kybernate.node.containerd import ContainerdRefused, ContainerdUnreachable
from kybernate.node.failure import Failure

if TYPE_CHECKING:
    from pathlib import Path

    from kybernate.agent.assembly import Agent
    from kybernate.agent.settings import Settings

HEALTH_SECONDS: Final = 5.0


class Sockets(Part):
    """Started last, once the operations of the journal are known."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self._agent = agent
        self._idleness = Idleness()
        self._serving = Serving(agent.settings, agent.config, agent.known.of_our_shims, agent.log, agent.given)

    async def start(self) -> None:
        """Raises Failure."""
        await self._agent.operations.engine.ready()
        self._uses = ActivityService(self._agent.known.inventory)
        self.closing.callback(self._uses.close)
        self.closing.push_async_callback(self._serving.stop)
        self.closing.callback(self._agent.events.hub.close)
        await self._serving.start(self._servicers())

    def work(self) -> Iterable[Work]:
        yield self._watch_health()
        yield self._uses.expire()

    async def reload(self, before: Settings) -> None:
        try:
            self._serving.refresh()
        except Failure as error:
            self._agent.not_applied(error)

    async def drain(self, seconds: float) -> None:
        """Show that the agent is not ready, and end waits that no operation has come of."""
        await self._serving.ready(False)
        self._idleness.stop()

    def _servicers(self) -> Servicers:
        agent, images, engine, hub = (
            self._agent,
            self._agent.images,
            self._agent.operations.engine,
            self._agent.events.hub,
        )
        peers = agent.settings().peers
        described = Described(agent.events.containerd.image_of)
        related = Related(images.replicas.elsewhere)
        logs = Logs(agent.events.containerd.log_path, lambda *key: hub.get("container", "/".join(key)) is not None)
        quota = Quota(lambda: agent.settings().self_socket.quota)
        return Servicers(
            Inventories(agent.known.inventory, hub, self._findings, logs),
            self._uses,
            with_verbs(Operations)(engine),
            with_verbs(Checkpoints)(images.registry, engine, hub.put, images.replicas.look_for),
            SeatsService(agent.known.inventory, hub),
            Own(engine, agent.known.find, self._checkpoint_root, quota, self._idleness, self._activity),
            PeerImages(images.registry, images.leases),
            ImageFiles(images.leases, peers.reads, Pace(lambda: agent.settings().peers.bytes_per_second)),
            {
                IMAGES: {**images.fetches.services()[IMAGES], **described.methods(), **related.methods()},
                **RoomForShims(agent.rooms.owner).services(),
            },
        )

    def _findings(self) -> Iterable[wire.Finding]:
        return own_findings(self._agent.live)

    def _checkpoint_root(self) -> Path:
        return self._agent.config().checkpoint_root

    async def _activity(self, own: OwnContainer) -> Activity:
        return await self._agent.known.inventory.activity((own.namespace, own.id))

    async def _watch_health(self) -> None:
        """Let the health service say whether operations are known and containerd answers."""
        await self._agent.known.inventory.containers.ready.wait()
        while True:
            try:
                await self._agent.events.containerd.version()
            except (ContainerdUnreachable, ContainerdRefused):
                await self._serving.ready(False)
            else:
                await self._serving.ready(True)
            await asyncio.sleep(HEALTH_SECONDS)
