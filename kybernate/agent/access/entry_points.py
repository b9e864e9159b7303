"""The three kinds of sockets: for users of the node, for containers, and for clients with certificates."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from kybernate.agent.access.caller import Caller, OwnContainer, Role
from kybernate.agent.access.certificates import Certificates, is_over, names_of
from kybernate.agent.access.front import Connected
from kybernate.agent.access.limits import Places
from kybernate.agent.access.own_container import NO_OWN_CONTAINER_ADVICE, container_of
from kybernate.agent.access.peers import Peer, peer_of, process_of
from kybernate.agent.access.relay import Stream, stream_of
from kybernate.agent.access.roles import role_of_names, role_of_user
from kybernate.agent.pending import Pending
from kybernate.agent.settings import Settings
from kybernate.messages.agent_pb2 import Container
from kybernate.node.failure import Denied, Failure

OF_A_CONTAINER: Final = 8  # connections
HANDSHAKE_SECONDS: Final = 10.0


class CertificateExpired(Failure):
    """The certificate of a client was valid when it connected, and has expired since."""

    advice = "connect again with a new certificate"


@dataclass
class UserEntryPoint:
    """The agent's own socket. `readers` is the number of the group that may look, None without one."""

    settings: Callable[[], Settings]
    readers: int | None
    places: Places = field(default_factory=Places)

    @asynccontextmanager
    async def enter(self, connection: socket.socket, quiet_since: float) -> AsyncIterator[tuple[Stream, Connected]]:
        peer = peer_of(connection)
        user = User(Caller(role_of_user(peer.uid, peer.groups, self.readers), peer.uid, peer.pid))
        with self.places.one(user.caller().key, self.settings().connections):
            async with _streamed(connection) as stream:
                yield stream, user


@dataclass(frozen=True)
class User:
    """A process of a user. The kernel has noted user and groups when it connected."""

    known: Caller

    def caller(self) -> Caller:
        return self.known


@dataclass
class ContainerEntryPoint:
    """The restricted socket. `containers` returns those of Kybernate's shims, as they are now."""

    containers: Callable[[], Iterable[Container]]
    places: Places = field(default_factory=Places)

    @asynccontextmanager
    async def enter(self, connection: socket.socket, quiet_since: float) -> AsyncIterator[tuple[Stream, Connected]]:
        peer = process_of(connection, quiet_since)
        try:
            one = Inhabitant(peer, container_of(peer, self.containers()), self.containers)
            with self.places.one(one.caller().key, OF_A_CONTAINER):
                async with _streamed(connection) as stream:
                    yield stream, one
        finally:
            peer.close()


@dataclass(frozen=True)
class Inhabitant:
    """A process of a container: the one that has connected, as long as it lives and is where it was."""

    peer: Peer
    container: OwnContainer
    containers: Callable[[], Iterable[Container]]

    def caller(self) -> Caller:
        """Raise Denied where the process has ended or moved, also if another one has its connection now."""
        if container_of(self.peer, self.containers()) != self.container:
            raise Denied(
                f"process {self.peer.pid} has left container {self.container.id}", advice=NO_OWN_CONTAINER_ADVICE
            )
        return Caller(Role.CONTAINER, self.peer.uid, self.peer.pid, container=self.container)


@dataclass
class CertificateEntryPoint:
    """TCP with mutual TLS. `changed` is called when connections of an earlier CA or certificate must end.

    Peers may share an address, behind a node or a gateway, with anything else there. So an address counts until the end
    of the handshake alone, where the oldest gives way, and the certificate from then on.
    """

    settings: Callable[[], Settings]
    changed: Callable[[], None]
    certificates: Certificates = field(default_factory=Certificates)
    handshakes: Pending = field(default_factory=Pending)
    places: Places = field(default_factory=Places)

    @asynccontextmanager
    async def enter(self, connection: socket.socket, quiet_since: float) -> AsyncIterator[tuple[Stream, Connected]]:
        context = self.refreshed()
        limit = self.settings().connections
        async with self.handshakes.one(f"handshakes of {connection.getpeername()[0]}", limit, HANDSHAKE_SECONDS):
            stream = await stream_of(connection, ssl=context, ssl_handshake_timeout=HANDSHAKE_SECONDS + 1)
        try:
            holder = Holder(stream.writer.get_extra_info("peercert") or {}, self.settings)
            with self.places.one(holder.caller().key, limit):
                yield stream, holder
        finally:
            await stream.close()

    def refreshed(self) -> Any:
        """Return the TLS context as the files are now; connections that began with others end."""
        before = self.certificates.generation
        context = self.certificates.context(self.settings().tls)
        if before and self.certificates.generation != before:
            self.changed()
        return context


@dataclass(frozen=True)
class Holder:
    """A client that has proved to have the key of a certificate of the configured CAs."""

    certificate: Mapping[str, Any]
    settings: Callable[[], Settings]

    def caller(self) -> Caller:
        """Return the caller with the role that the settings give it now."""
        role, name = role_of_names(names_of(self.certificate), self.settings().tls)
        if is_over(self.certificate):
            raise CertificateExpired(f"the certificate of {name} has expired")
        return Caller(role, name=name)


@asynccontextmanager
async def _streamed(connection: socket.socket) -> AsyncIterator[Stream]:
    stream = await stream_of(connection)
    try:
        yield stream
    finally:
        await stream.close()
