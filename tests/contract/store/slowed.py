"""A proxy in front of a server, which holds answers back as long as a test wants."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PIECE = 64 << 10


class SlowedServer:
    """Connections on which a request has one of the `held` words get no answer until `release`."""

    def __init__(self, upstream: int) -> None:
        self._upstream = upstream
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._held = b""
        self._released = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def hold(self, words: str) -> None:
        self._released.clear()
        self._held = words.encode()

    def release(self) -> None:
        self._held = b""
        self._released.set()

    def close(self) -> None:
        self.release()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._upstream))
                held = threading.Event()
                threading.Thread(target=self._requests, args=(client, server, held), daemon=True).start()
                threading.Thread(target=self._answers, args=(server, client, held), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket, held: threading.Event) -> None:
        with suppress(OSError):
            while data := client.recv(PIECE):
                if self._held and self._held in data:
                    held.set()
                server.sendall(data)
        _shut(client, server)

    def _answers(self, server: socket.socket, client: socket.socket, held: threading.Event) -> None:
        with suppress(OSError):
            while data := server.recv(PIECE):
                if held.is_set():
                    self._released.wait()
                client.sendall(data)
        _shut(client, server)


def _shut(*sockets: socket.socket) -> None:
    for one in sockets:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


@contextmanager
def slowed(port: int) -> Iterator[SlowedServer]:
    """Run a proxy for the server on a port of the loopback."""
    server = SlowedServer(port)
    try:
        yield server
    finally:
        server.close()
