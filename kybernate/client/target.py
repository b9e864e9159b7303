"""Where an agent listens, and how a channel to it is made: a UNIX socket, or TCP with mutual TLS."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import grpc
import grpc.aio

from kybernate import addresses
from kybernate.client.contexts import LOCAL, Tls, load
from kybernate.client.errors import AgentUnreachable
from kybernate.node.failure import Failure

DEFAULT_SOCKET, VARIABLE = addresses.AGENT, addresses.AGENT_VARIABLE
MAX_MESSAGE = 64 << 20  # bytes; a list of some thousand images
OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.default_authority", "localhost"),  # a socket's path is none
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.use_local_subchannel_pool", 1),  # two connections of a process are two callers' own
)


class TlsMissing(Failure, ValueError):
    """An address of TCP, and nothing that says by which certificate to call it: a program has passed too little."""

    advice = "name `ca`, `certificate` and `key` in a context or in client.toml, or pass tls=Tls(…)"


@dataclass(frozen=True)
class Endpoint:
    """An address in gRPC's form, with what TLS needs; without `tls` it is a UNIX socket of this machine."""

    address: str
    tls: Tls | None = None

    def channel(self) -> grpc.Channel:
        """Return a blocking channel. Raises AgentUnreachable where a file of `tls` cannot be read."""
        if self.tls is None:
            return grpc.insecure_channel(self.address, options=OPTIONS)
        return grpc.secure_channel(self.address, _credentials(self.tls), options=_with_name(self.tls))

    def aio_channel(self) -> grpc.aio.Channel:
        """Return a channel for asyncio; raises as `channel` does."""
        if self.tls is None:
            return grpc.aio.insecure_channel(self.address, options=OPTIONS)
        return grpc.aio.secure_channel(self.address, _credentials(self.tls), options=_with_name(self.tls))


def target_of(address: str = "", tls: Tls | None = None, environment: Mapping[str, str] = os.environ) -> Endpoint:
    """Return the target that `address` means: a path or unix:PATH, HOST:PORT with TLS, or the name of a context.

    "" is $KYBERNATE_AGENT, and without that the node's own socket. HOST:PORT without `tls` has that of client.toml.
    Raises TlsMissing for TCP without TLS: the agent knows its callers there by their certificates alone.
    """
    wanted = address or environment.get(VARIABLE, "") or LOCAL
    wanted = DEFAULT_SOCKET if wanted == LOCAL else wanted
    if ":" not in wanted and "/" not in wanted:
        context = load().named(wanted)
        wanted, tls = context.address, tls or context.tls
    if wanted.startswith(("/", "unix:")):
        return Endpoint(f"unix:{wanted.removeprefix('unix://').removeprefix('unix:')}")
    if tls is None:
        tls = load().tls
    if tls is None:
        raise TlsMissing(f"{wanted} needs TLS, and there is no certificate for it")
    return Endpoint(wanted, tls)


def _credentials(tls: Tls) -> grpc.ChannelCredentials:
    try:
        ca, key, certificate = (path.read_bytes() for path in (tls.ca, tls.key, tls.certificate))
    except OSError as error:
        raise AgentUnreachable(f"{error.filename} cannot be read: {error.strerror}") from error
    return grpc.ssl_channel_credentials(ca, key, certificate)


def _with_name(tls: Tls) -> list[tuple[str, str | int]]:
    """Return the options of a channel whose authority is the host, or the name that the certificate has."""
    options: list[tuple[str, str | int]] = [one for one in OPTIONS if one[0] != "grpc.default_authority"]
    if tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return options
