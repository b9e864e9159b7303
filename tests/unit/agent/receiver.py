"""A real HTTP server that receives webhooks, and fails, hangs or refuses as a test wants."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Received:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def event(self) -> dict[str, Any]:
        return json.loads(self.body)


Answer = Callable[[BaseHTTPRequestHandler], None]


def status(code: int, **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


def broken(handler: BaseHTTPRequestHandler) -> None:
    """Break the connection off before any answer."""
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


@dataclass
class Receiver:
    """What arrived, and the answers for the next requests; after them, 204."""

    url: str = ""
    received: list[Received] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    def hang(self, handler: BaseHTTPRequestHandler) -> None:
        self.released.wait(30)

    def drip(self, handler: BaseHTTPRequestHandler) -> None:
        """Send a head that never ends."""
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        while not self.released.wait(0.01):
            try:
                handler.wfile.write(b"X-More: 1\r\n")
            except OSError:
                return

    @property
    def ids(self) -> list[int]:
        return [one.event["id"] for one in self.received]


@contextmanager
def receiver(tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    there = Receiver()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            there.received.append(Received(self.path, dict(self.headers), body))
            (there.answers.pop(0) if there.answers else status(204))(self)

        def handle(self) -> None:
            try:
                super().handle()
            except OSError:
                pass  # the client has gone away, as some tests want it

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:  # the handshake is left to the thread of the connection
        server.socket = tls.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )  # but in a thread
    there.url = f"http{'s' if tls else ''}://127.0.0.1:{server.server_address[1]}/hook?token=secret"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield there
    finally:
        there.released.set()
        server.shutdown()
        server.server_close()
        thread.join(5)
