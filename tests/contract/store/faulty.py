"""A proxy in front of an S3 server, which is slow, refuses requests, or breaks connections, as a test wants."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import IO

PIECE = 64 << 10
HOPS = ("connection", "transfer-encoding", "keep-alive")  # headers that are of one connection
REFUSAL = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{}</Code><Message>{}</Message></Error>'
BROKEN = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset


@dataclass
class Fault:
    """What befalls the next `times` requests of a method below a path, after the first `after` of them.

    Either an answer of `status` with S3's error `code`, or, without a status, a reset in the middle of the body.
    """

    method: str
    path: str
    status: int = 0
    code: str = ""
    times: int = 1 << 30
    after: int = 0


class FaultyServer:
    """`bytes_per_second` limits each connection, 0 for no limit. `met` counts requests that met a fault.

    `headers`, in lower case, take the place of those of requests. `lists` makes another content of each list.
    """

    def __init__(self, upstream: int) -> None:
        self.bytes_per_second = 0
        self.met = 0
        self.headers: dict[str, str] = {}
        self.lists: Callable[[bytes], bytes] | None = None
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler(upstream))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(self, *faults: Fault) -> None:
        with self._lock:
            self._faults += faults

    def heal(self) -> None:
        with self._lock:
            self._faults.clear()
        self.bytes_per_second = 0

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def fault_of(self, method: str, path: str) -> Fault | None:
        """Return what befalls a request, and count it."""
        with self._lock:
            for fault in self._faults:
                if fault.method != method or fault.path not in path or not fault.times:
                    continue
                if fault.after:
                    fault.after -= 1
                    return None
                fault.times -= 1
                self.met += 1
                return fault
        return None

    def _handler(self, upstream: int) -> type[BaseHTTPRequestHandler]:
        faulty = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                fault = faulty.fault_of(self.command, self.path)
                if fault is not None and not fault.status and self.command == "PUT":
                    self.rfile.read(length // 2)
                    return self._reset()
                body = b"".join(self._read(self.rfile, length))
                if fault is not None and fault.status:
                    return self._refuse(fault)
                return self._forward(body, broken=fault is not None)

            do_PUT = do_POST = do_DELETE = do_HEAD = do_GET  # noqa: N815  # names of the library's

            def _forward(self, body: bytes, *, broken: bool) -> None:
                connection = http.client.HTTPConnection("127.0.0.1", upstream, timeout=60)
                connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    connection.putheader(name, faulty.headers.get(name.lower(), value))
                connection.endheaders(body or None)
                answer = connection.getresponse()
                content, status = answer.read(), answer.status
                if faulty.lists and self.command == "GET" and "list-type=2" in self.path:
                    content, status = faulty.lists(content), 200
                self.send_response_only(status)
                length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
                for name, value in answer.getheaders():
                    if name.lower() not in (*HOPS, "content-length"):
                        self.send_header(name, value)
                if length is not None:
                    self.send_header("Content-Length", length)
                self.end_headers()
                connection.close()
                for begin in range(0, len(content), PIECE):
                    if broken and begin >= len(content) // 2:
                        return self._reset()
                    self.wfile.write(content[begin : begin + PIECE])
                    self._pace(PIECE)
                return None

            def _refuse(self, fault: Fault) -> None:
                content = REFUSAL.format(fault.code, "refused by the test").encode()
                self.send_response_only(fault.status)
                self.send_header("Content-Type", "application/xml")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def _reset(self) -> None:
                self.close_connection = True
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, BROKEN)
                self.connection.shutdown(socket.SHUT_RD)
                self.connection.close()

            def _read(self, stream: IO[bytes], length: int) -> Iterator[bytes]:
                while length and (data := stream.read(min(PIECE, length))):
                    length -= len(data)
                    self._pace(len(data))
                    yield data

            def _pace(self, count: int) -> None:
                if faulty.bytes_per_second:
                    time.sleep(count / faulty.bytes_per_second)

            def log_message(self, format: str, *arguments: object) -> None:
                return None

        return Handler


@contextmanager
def faulty(port: int) -> Iterator[FaultyServer]:
    """Run a proxy for the server on a port of the loopback."""
    server = FaultyServer(port)
    try:
        yield server
    finally:
        server.close()
