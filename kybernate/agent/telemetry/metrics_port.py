"""The port for Prometheus: it answers from a bounded number of threads, however many clients connect and say nothing.

Every host that reaches the port may connect to it. A connection beyond the bound takes the place of the oldest one,
which has had its time: so clients that hold theirs open keep no scraper out.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

MOST_CONNECTIONS: Final = 16
QUIET_SECONDS: Final = 10.0  # without a byte from the client


class _Handler(WSGIRequestHandler):
    timeout = QUIET_SECONDS

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: a scrape is no event."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Answers HTTP on a port with what is in `registry`. Raises OSError where it cannot listen."""

    daemon_threads, block_on_close = True, False

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        ((self.address_family, _, _, _, address), *_) = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        self._open: dict[socket.socket, None] = {}  # the oldest first
        self._lock = threading.Lock()
        super().__init__(address[:2], _Handler)  # type: ignore[arg-type]
        self.set_app(make_wsgi_app(registry))

    def start(self) -> None:
        """Answer, in threads, until `shutdown()`."""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own, in the place of the oldest where there are too many."""
        with self._lock:
            self._open[request] = None
            excess = list(self._open)[:-MOST_CONNECTIONS]
            for one in excess:
                del self._open[one]
        _end(excess)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that has ended."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report nothing: a connection that breaks or is quiet for too long is the client's affair."""


def _end(connections: Iterable[socket.socket]) -> None:
    """Let the threads of these connections see their end; each closes its own."""
    for connection in connections:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
