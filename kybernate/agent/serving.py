"""gRPC's servers and the sockets before them: one for users and certificates, one for containers."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection

from kybernate.agent import sockets
from kybernate.agent.access.audit import AuditLog
from kybernate.agent.access.entry_points import CertificateEntryPoint, ContainerEntryPoint, UserEntryPoint
from kybernate.agent.access.front import Callers, EntryPoint, Front, Handler
from kybernate.agent.access.interceptor import Access
from kybernate.agent.access.limits import Buckets
from kybernate.agent.service.errors import Translate
from kybernate.agent.settings import Settings
from kybernate.messages import agent_pb2, agent_pb2_grpc, peer_pb2, peer_pb2_grpc
from kybernate.messages.agent_pb2 import Container
from kybernate_shim.config import Config
from kybernate_shim.run_directory import IMAGES_SOCKET
from kybernate_shim.ttrpc import Server, Services

LIVENESS: Final = "liveness"  # of the health service; "" is readiness
SERVED: Final = ("Inventory", "Activity", "Operations", "Checkpoints", "Seats", "Peers")
GRACE_SECONDS: Final = 2.0
OPTIONS: Final = (
    ("grpc.max_receive_message_length", 1 << 20),  # no request is larger
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 600_000),  # a client that asks again connects again by itself
    ("grpc.max_concurrent_streams", 256),  # of one connection
    # Go's clients ping every ten seconds at most, some of them without a call; timers fire early, networks bunch pings.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 2),  # pings that come sooner: with one more, the connection ends
)


@dataclass(frozen=True)
class Servicers:
    """What answers. `own` is the service on the restricted socket, `files` what answers HTTP on the TLS port.

    `shims` are the services for shims, which speak ttrpc.
    """

    inventory: agent_pb2_grpc.InventoryServicer
    activity: agent_pb2_grpc.ActivityServicer
    operations: agent_pb2_grpc.OperationsServicer
    checkpoints: agent_pb2_grpc.CheckpointsServicer
    seats: agent_pb2_grpc.SeatsServicer
    own: agent_pb2_grpc.SelfServicer
    peers: peer_pb2_grpc.PeersServicer
    files: Handler
    shims: Services


@dataclass
class Serving:
    """All that clients reach. `given` are the sockets that systemd has opened."""

    settings: Callable[[], Settings]
    config: Callable[[], Config]
    containers: Callable[[], Iterable[Container]]
    log: Any
    given: Mapping[str, socket.socket] = field(default_factory=dict)
    health: Any = field(default_factory=health.HealthServicer)
    _fronts: list[Front] = field(default_factory=list)
    _servers: list[grpc.aio.Server] = field(default_factory=list)
    _own: list[Path] = field(default_factory=list)
    _tls: CertificateEntryPoint | None = None
    _shims: Server | None = None

    async def start(self, servicers: Servicers) -> None:
        """Open all sockets. Raises Failure."""
        settings = self.settings()
        group = sockets.group_of(settings.reader_group)
        private = sockets.private_directory(settings.socket)
        callers, buckets = Callers(), Buckets(time.monotonic)
        audit = AuditLog(self.config, self.log, buckets)
        interceptors = [Translate(self.log), Access(callers, audit, self.settings, buckets)]
        main = await self._server(private / "agent", interceptors, lambda server: self._add(server, servicers))
        users = self._taken("agent", settings.socket, lambda path: sockets.for_readers(path, group))
        sockets.admit_readers(settings.socket, group)
        self._front(users, main, callers, UserEntryPoint(self.settings, group))
        if settings.tls.listen:
            listener = sockets.passed("tls", self.given) or sockets.on_tcp(settings.tls.listen)
            self._tls = CertificateEntryPoint(self.settings, lambda: tls.end_all())
            self._tls.refreshed()
            tls = self._front(listener, main, callers, self._tls, servicers.files)
        if settings.self_socket.enabled:
            own = await self._server(private / "self", interceptors, lambda server: _add_own(server, servicers.own))
            listener = self._taken("self", settings.self_socket.path, sockets.for_containers)
            self._front(listener, own, callers, ContainerEntryPoint(self.containers))
        await self._serve_shims(settings.socket.with_name(IMAGES_SOCKET.name), servicers.shims)
        await self.ready(False)

    async def _serve_shims(self, path: Path, services: Services) -> None:
        """Serve root's processes, by the same protocol as containerd. Raises Failure."""
        self._shims = Server(services)
        self._own.append(path)
        await self._shims.start(sockets.for_shims(path))

    async def ready(self, ready: bool) -> None:
        """Let the health service say whether the agent can work; it lives in either case."""
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        await self.health.set("", status)
        await self.health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)

    def refresh(self) -> None:
        """Read the certificates again. Raises Failure; no connection begins with the former ones then."""
        if self._tls is not None:
            self._tls.refreshed()

    async def stop(self) -> None:
        """Take no more connections, let calls end for a moment, and remove the sockets that are the agent's own."""
        for server in self._servers:
            await server.stop(GRACE_SECONDS)
        await asyncio.gather(*(front.stop() for front in self._fronts))
        if self._shims is not None:
            await self._shims.close(grace=GRACE_SECONDS)
        for path in self._own:
            path.unlink(missing_ok=True)

    def _taken(self, name: str, path: Path, opened: Callable[[Path], socket.socket]) -> socket.socket:
        """Return the socket that systemd has opened, else the agent's own, which it removes in the end."""
        given = sockets.passed(name, self.given)
        if given is not None:
            return given
        self._own.append(path)
        return opened(path)

    def _front(
        self,
        listener: socket.socket,
        server: Path,
        callers: Callers,
        entry_point: EntryPoint,
        files: Handler | None = None,
    ) -> Front:
        front = Front(listener, server, callers, entry_point, self.log, files)
        front.start()
        self._fronts.append(front)
        return front

    async def _server(self, directory: Path, interceptors: list[Any], add: Callable[[grpc.aio.Server], None]) -> Path:
        path = directory.with_suffix(".sock")
        server = grpc.aio.server(interceptors=interceptors, options=OPTIONS)
        add(server)
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        self._servers.append(server)
        return path

    def _add(self, server: grpc.aio.Server, servicers: Servicers) -> None:
        agent_pb2_grpc.add_InventoryServicer_to_server(servicers.inventory, server)
        agent_pb2_grpc.add_ActivityServicer_to_server(servicers.activity, server)
        agent_pb2_grpc.add_OperationsServicer_to_server(servicers.operations, server)
        agent_pb2_grpc.add_CheckpointsServicer_to_server(servicers.checkpoints, server)
        agent_pb2_grpc.add_SeatsServicer_to_server(servicers.seats, server)
        peer_pb2_grpc.add_PeersServicer_to_server(servicers.peers, server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        services = {**agent_pb2.DESCRIPTOR.services_by_name, **peer_pb2.DESCRIPTOR.services_by_name}
        served = [services[name].full_name for name in SERVED]
        known = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        reflection.enable_server_reflection([*served, known, reflection.SERVICE_NAME], server)


def _add_own(server: grpc.aio.Server, servicer: agent_pb2_grpc.SelfServicer) -> None:
    agent_pb2_grpc.add_SelfServicer_to_server(servicer, server)
