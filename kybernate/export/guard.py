"""What an image registry cannot make its client do: read without end, and go where the node alone may.

A registry chooses the addresses of blobs, uploads and tokens, and the bodies of its answers. A request is looked at
before it is sent, also one that follows a redirect; an answer whose body is not a manifest or a blob is cut, and is
never decompressed: none was asked to be.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import httpx

from kybernate.node.failure import Failure

MOST_ANSWER: Final = 1 << 20  # bytes of an answer that is neither a manifest nor a blob
ANSWER_SECONDS: Final = 60.0  # in which it comes
CONTENT: Final = "kybernate.content"  # extension of a request whose answer is read within limits of its reader
WHOLE: Final = (httpx.codes.OK, httpx.codes.PARTIAL_CONTENT)
SCHEMES: Final = {"https": ("https",), "http": ("http", "https")}


@dataclass
class Guard:
    """The hooks of a client for the registry at `origin`, which is reached by a proxy where it is `proxied`."""

    origin: httpx.URL
    proxied: bool = False
    _known: dict[str, frozenset[str]] = field(default_factory=dict)

    def before(self, request: httpx.Request) -> None:
        """Raise Failure for an address that the registry may not name."""
        url = request.url
        if url.scheme not in SCHEMES[self.origin.scheme]:
            raise Failure(f"{self.origin.host} names {url.host} without TLS, or by another protocol")
        if url.host != self.origin.host and (inner := self._kinds(url.host) - self._kinds(self.origin.host)):
            raise Failure(f"{self.origin.host} names {url.host}, which is a {min(inner)} address")

    def after(self, response: httpx.Response) -> None:
        """Cut the body of an answer that its caller does not read piece by piece.

        Raises Failure for an answer from where the registry may not lead: a server of names may give
        another address for the connection than it gave when the name was looked at.
        """
        if inner := self._came_from(response) - self._kinds(self.origin.host):
            raise Failure(
                f"{response.request.url.host} has answered from a {min(inner)} address, to which its name did not lead"
            )
        if response.request.extensions.get(CONTENT) and response.status_code in WHOLE:
            return
        response.headers.pop("content-encoding", None)
        if isinstance(response.stream, httpx.SyncByteStream):
            response.stream = _Cut(response.stream)

    def _came_from(self, response: httpx.Response) -> frozenset[str]:
        """Return the kind of the address that has answered, none where that is unknown or a proxy of the node's."""
        stream = response.extensions.get("network_stream")
        place = stream.get_extra_info("server_addr") if stream is not None and not self.proxied else None
        kind = _kind(str(place[0]).partition("%")[0]) if place else ""
        return frozenset({kind} if kind else ())

    def _kinds(self, host: str) -> frozenset[str]:
        if host not in self._known:
            self._known[host] = _kinds(host)
        return self._known[host]


class _Cut(httpx.SyncByteStream):
    """The beginning of a body."""

    def __init__(self, whole: httpx.SyncByteStream) -> None:
        self._whole = whole

    def __iter__(self) -> Iterator[bytes]:
        left, until = MOST_ANSWER, time.monotonic() + ANSWER_SECONDS
        for piece in self._whole:
            yield piece[:left]
            left -= len(piece)
            if left <= 0 or time.monotonic() > until:
                return

    def close(self) -> None:
        self._whole.close()


def _kinds(host: str) -> frozenset[str]:
    """Return which kinds of addresses of the node's own a host has; none where its name leads to none from here."""
    try:
        found = {str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return frozenset()
    return frozenset(kind for address in found if (kind := _kind(address)))


def _kind(text: str) -> str:
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback or address.is_unspecified:
        return "loopback"
    return "link-local" if address.is_link_local else ""
