"""Connections of clients: how many of one address, how slowly a head may arrive, and errors in the API's own form."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from kybernate.proxy.api_errors import Refusal, body_of
from kybernate.proxy.embedded.headers import Networks, is_trusted
from kybernate.proxy.settings import Limits

TOO_MANY = (
    b"HTTP/1.1 429 Too Many Requests\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: 44\r\n"
    b"Retry-After: 1\r\nConnection: close\r\n\r\nthis client has too many connections to here"
)
CLOSED_STATES = frozenset({7, 8, 9, 11})  # CLOSE, CLOSE_WAIT, LAST_ACK, CLOSING, as the kernel numbers them
SLOW = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
HTTP2 = "HTTP/2 without TLS is answered by the plane haproxy alone (plane: haproxy)"


def has_hung_up(transport: asyncio.BaseTransport | None) -> bool:
    """Return whether the peer has closed a connection of which nothing is read now, so that no end is seen.

    Its end follows all that it has sent, so it is seen where that fits into the sockets' buffers.
    """
    connection = transport.get_extra_info("socket") if transport is not None else None
    if connection is None:
        return True
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in CLOSED_STATES
    except OSError:
        return False  # no TCP
    except ValueError:
        return True  # closed by now


class Connection(RequestHandler):
    """One connection. Its first head has `head_seconds`; those after it the same from the last answer on."""

    __slots__ = ("_counted", "_head_timer", "_http2", "_server")

    def __init__(self, server: Connections, **options: Any) -> None:
        super().__init__(server, **options)
        self._server = server
        self._counted = ""
        self._http2 = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        client = peer[0] if isinstance(peer, tuple) else ""
        self._head_timer = self._loop.call_later(self._server.limits.head_seconds, self._head_is_late)
        if client and not is_trusted(client, self._server.trusted):
            self._counted = client
            self._server.clients[client] += 1
            most = self._server.limits.per_client
            if most and self._server.clients[client] > most:
                self._end(TOO_MANY)

    def data_received(self, data: bytes) -> None:
        if not self._request_count and data.startswith(b"PRI * HTTP/2.0"):
            self._http2 = True
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.head_arrived()
        if self._counted:
            self._server.clients[self._counted] -= 1
            if not self._server.clients[self._counted]:
                del self._server.clients[self._counted]
        super().connection_lost(exc)

    def head_arrived(self) -> None:
        """The first request is whole."""
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if not self._request_count:
            self._end(SLOW)

    def _end(self, answer: bytes) -> None:
        if self.transport is not None:
            self.transport.write(answer)
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is no request, or what a defect of ours has ended, without words of ours about the inside."""
        if status < 500:
            refusal = Refusal(status, "bad_request", HTTP2 if self._http2 else "the request is malformed")
        else:
            self._server.failed(exc)
            refusal = Refusal(status, "internal", "the proxy failed; its log has the reason")
        body, kind = body_of(refusal, "openai", "")
        answer = web.Response(status=status, body=body, headers={"Content-Type": kind})
        answer.force_close()
        return answer


class Connections(web.Server):
    """Makes a Connection of each that is accepted. `clients` counts those of each address."""

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        limits: Limits,
        trusted: Networks,
        failed: Callable[[BaseException | None], None],
    ) -> None:
        super().__init__(handler, handler_cancellation=True)
        self.limits, self.trusted, self.failed = limits, trusted, failed
        self.clients: Counter[str] = Counter()
        self._options = {
            "loop": asyncio.get_running_loop(),
            "keepalive_timeout": limits.idle_seconds,
            "access_log": None,
            "auto_decompress": False,
            "lingering_time": 5.0,
            "max_line_size": limits.head_line,
            "max_field_size": limits.head_line,
            "max_headers": limits.headers,
        }

    def __call__(self) -> Connection:
        return Connection(self, **self._options)
