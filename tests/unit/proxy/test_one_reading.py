"""What the embedded plane, alone and behind HAProxy, reads a connection's bytes as: what is meant, or less.

Each case has the requests that its sender may mean. A plane may refuse each of them; it reads no others.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from multidict import CIMultiDict

from kybernate.proxy.embedded.connection import Connections
from kybernate.proxy.embedded.exchange import head_of
from kybernate.proxy.embedded.headers import mistake_in
from kybernate.proxy.settings import Limits
from tests.contract.proxy.test_smuggling import GOAWAY, HEADERS, PSEUDO, RST_STREAM, frames, request, with_pseudo
from tests.unit.proxy.test_haproxy_reads import Haproxy

SETTINGS = """
listen: 127.0.0.1:1
plane: haproxy
models: {one: {upstream: "http://127.0.0.1:2"}}
limits: {head_seconds: 20s, body_seconds: 20s, idle_seconds: 20s}
haproxy: {state: STATE}
"""
SECONDS = 60.0
Read = tuple[str, bytes]  # path and body
GET, POST = b"GET /a HTTP/1.1\r\nHost: h\r\n", b"POST /a HTTP/1.1\r\nHost: h\r\n"
NEXT = b"GET /next HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: h\r\n\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
A, FULL, THEN = ("/a", b""), ("/a", b"abcd"), ("/next", b"")
ENDED = b"\r\nabcd\r\n0\r\n\r\n"


def sized(length: bytes) -> bytes:
    return POST + b"Content-Length:" + length + b"\r\n\r\nabcd" + NEXT


def coded(coding: bytes) -> bytes:
    return POST + b"Transfer-Encoding:" + coding + b"\r\n\r\n4" + ENDED + NEXT


def hiding(head: bytes) -> bytes:
    """Return a request whose body is another one."""
    return head + b"Content-Length: %d\r\n\r\n" % len(HIDDEN) + HIDDEN + NEXT


CASES: dict[str, tuple[bytes, list[Read]]] = {
    "plain": (GET + b"\r\n" + NEXT, [A, THEN]),
    "header twice": (GET + b"X-A: 1\r\nx-a: 2\r\nX-B: 3\r\n\r\n" + NEXT, [A, THEN]),
    "target of the same host": (b"GET http://h/a HTTP/1.1\r\nHost: h\r\n\r\n" + NEXT, [A, THEN]),
    "target of the same host and port": (b"GET http://h:80/a HTTP/1.1\r\nHost: h\r\n\r\n" + NEXT, [A, THEN]),
    "target of another host": (b"GET http://evil/a HTTP/1.1\r\nHost: h\r\n\r\n" + NEXT, [THEN]),
    "target of another port": (b"GET http://h:81/a HTTP/1.1\r\nHost: h\r\n\r\n" + NEXT, [THEN]),
    "target with a user": (b"GET http://h@evil/a HTTP/1.1\r\nHost: h\r\n\r\n" + NEXT, [THEN]),
    "target with a fragment": (b"GET /a#b HTTP/1.1\r\nHost: h\r\n\r\n" + NEXT, [THEN]),
    "target without a slash": (b"GET a HTTP/1.1\r\nHost: h\r\n\r\n" + NEXT, [THEN]),
    "host twice": (GET + b"Host: h\r\n\r\n" + NEXT, [A, THEN]),
    "two hosts": (GET + b"Host: evil\r\n\r\n" + NEXT, [THEN]),
    "two hosts in a list": (b"GET /a HTTP/1.1\r\nHost: h, evil\r\n\r\n" + NEXT, [THEN]),
    "refused": (b"GET /missing HTTP/1.1\r\nHost: h\r\n\r\n" + NEXT, [THEN]),
    "refused, with a body": (hiding(b"POST /missing HTTP/1.1\r\nHost: h\r\n"), [THEN]),
    "refused twice": (2 * b"GET /missing HTTP/1.1\r\nHost: h\r\n\r\n" + GET + b"\r\n" + NEXT, [A, THEN]),
    "refused, waits for a word": (hiding(b"POST /missing HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\n"), [THEN]),
    "waits for a word, and sends": (sized(b" 4\r\nExpect: 100-continue"), [FULL, THEN]),
    "waits in capitals": (sized(b" 4\r\nExpect: 100-CONTINUE"), [FULL, THEN]),
    "waits without a body": (GET + b"Expect: 100-continue\r\n\r\n" + NEXT, [A, THEN]),
    "expects what is unknown": (hiding(POST + b"Expect: 200-ok\r\n"), [THEN]),
    "name with a space": (hiding(POST + b"X A: b\r\n"), [THEN]),
    "name before a space": (hiding(POST + b"X-A : b\r\n"), [THEN]),
    "name in brackets": (hiding(POST + b"(X): b\r\n"), [THEN]),
    "underscore for a hyphen in the length": (POST + b"Content_Length: 4\r\n\r\n" + NEXT, [A, THEN]),
    "underscore for a hyphen in the coding": (POST + b"Transfer_Encoding: chunked\r\n\r\n" + NEXT, [A, THEN]),
    "length": (sized(b"4"), [FULL, THEN]),
    "length in spaces": (sized(b" \t4 \t"), [FULL, THEN]),
    "length with zeros": (sized(b" 0004"), [FULL, THEN]),
    "length twice": (sized(b" 4\r\nContent-Length: 4"), [FULL, THEN]),
    "length in a list": (sized(b" 4, 4"), [FULL, THEN]),
    "length in a list of several": (sized(b" 4, 5"), []),
    "length with a plus": (sized(b" +4"), []),
    "length with a minus": (sized(b" -4"), []),
    "length in hexadecimal": (sized(b" 0x4"), []),
    "length with a fraction": (sized(b" 4.0"), []),
    "length with a parameter": (sized(b" 4;"), []),
    "length with a comma": (sized(b" 4,"), [FULL, THEN]),
    "length and what is no digit": (sized(b" 4 4"), []),
    "chunks": (coded(b" chunked"), [FULL, THEN]),
    "chunks in capitals": (coded(b" CHUNKED"), [FULL, THEN]),
    "chunks in letters of both cases": (coded(b"cHuNkEd"), [FULL, THEN]),
    "chunks in spaces": (coded(b" \tchunked\t "), [FULL, THEN]),
    "chunks in a list": (coded(b" ,chunked,"), [FULL, THEN]),
    "chunks with a parameter": (coded(b" chunked;a"), []),
    "chunks after another coding": (coded(b" gzip, chunked"), []),
    "chunks before another coding": (coded(b" chunked, gzip"), []),
    "chunks in a form feed": (coded(b"\x0cchunked"), []),
    "chunks on the next line": (coded(b"\r\n chunked"), [FULL, THEN]),
    "chunks on the line after a tab": (coded(b"\r\n\tchunked"), [FULL, THEN]),
    "chunks and a length": (coded(b" chunked\r\nContent-Length: 3"), [FULL, THEN]),
    "size with zeros": (CHUNKED + b"0004" + ENDED + NEXT, [FULL, THEN]),
    "size with a plus": (CHUNKED + b"+4" + ENDED + NEXT, []),
    "size with a minus": (CHUNKED + b"-4" + ENDED + NEXT, []),
    "size with a prefix": (CHUNKED + b"0x4" + ENDED + NEXT, []),
    "size with an underscore": (CHUNKED + b"0_4" + ENDED + NEXT, []),
    "size that overflows": (CHUNKED + b"10000000000000004" + ENDED + NEXT, []),
    "size in spaces": (CHUNKED + b"4 \t" + ENDED + NEXT, [FULL, THEN]),
    "extension": (CHUNKED + b"4;a=b;c" + ENDED + NEXT, [FULL, THEN]),
    "extension in quotes": (CHUNKED + b'4;a="b;c"' + ENDED + NEXT, [FULL, THEN]),
    "extension after a space": (CHUNKED + b"4 ;a" + ENDED + NEXT, [FULL, THEN]),
    "extension with a line feed": (CHUNKED + b"4;a\nb" + ENDED + NEXT, []),
    "extension with a carriage return": (CHUNKED + b"4;a\rb" + ENDED + NEXT, []),
    "line feed after the size": (CHUNKED + b"4\nabcd\r\n0\r\n\r\n" + NEXT, [FULL, THEN]),
    "line feed after the chunk": (CHUNKED + b"4\r\nabcd\n0\r\n\r\n" + NEXT, [FULL, THEN]),
    "nothing after the chunk": (CHUNKED + b"4\r\nabcd0\r\n\r\n" + NEXT, []),
    "more in the chunk": (CHUNKED + b"4\r\nabcdef\r\n0\r\n\r\n" + NEXT, []),
    "trailer": (CHUNKED + b"4\r\nabcd\r\n0\r\nX-Team: red\r\n\r\n" + NEXT, [FULL, THEN]),
    "trailer with a host": (CHUNKED + b"4\r\nabcd\r\n0\r\nHost: evil\r\n\r\n" + NEXT, [FULL, THEN]),
    "trailer with a length": (CHUNKED + b"4\r\nabcd\r\n0\r\nContent-Length: 9\r\n\r\n" + NEXT, [FULL, THEN]),
    "trailer that is a request": (CHUNKED + b"4\r\nabcd\r\n0\r\n" + HIDDEN + NEXT, []),
    "folded header": (GET + b"X-A: 1\r\n Host: evil\r\n\r\n" + NEXT, [A, THEN]),
    "folded header with a tab": (GET + b"X-A: 1\r\n\tX-B: 2\r\n\r\n" + NEXT, [A, THEN]),
    "fold in the first header": (b"GET /a HTTP/1.1\r\n Host: h\r\n\r\n" + NEXT, []),
    "line feeds alone": (GET.replace(b"\r", b"") + b"\n" + NEXT, [A, THEN]),
    "line feed in a header": (hiding(POST + b"X-A: 1\nX-B: 2\r\n"), [("/a", HIDDEN), THEN]),
    "carriage return in a header": (hiding(POST + b"X-A: 1\rX-B: 2\r\n"), []),
    "line before the request": (b"\r\n" + GET + b"\r\n" + NEXT, [A, THEN]),
    "HTTP/1.0": (b"GET /a HTTP/1.0\r\nHost: h\r\n\r\n" + HIDDEN, [A]),
    "HTTP/1.0 that is kept": (b"GET /a HTTP/1.0\r\nHost: h\r\nConnection: keep-alive\r\n\r\n" + NEXT, [A, THEN]),
    "HTTP/1.0 in chunks": (CHUNKED.replace(b"1.1", b"1.0") + b"4" + ENDED + NEXT, []),
    "HTTP/1.0 with a body": (sized(b" 4").replace(b"1.1", b"1.0", 1), [FULL]),
    "last request": (GET + b"Connection: close\r\n\r\n" + HIDDEN, [A]),
    "last request in a list": (GET + b"Connection: x, Close\r\n\r\n" + HIDDEN, [A]),
    "version in small letters": (b"GET /a http/1.1\r\nHost: h\r\n\r\n" + NEXT, []),
    "version with a zero": (b"GET /a HTTP/01.1\r\nHost: h\r\n\r\n" + NEXT, []),
    "version of two digits": (b"GET /a HTTP/1.10\r\nHost: h\r\n\r\n" + NEXT, []),
    "space after the version": (b"GET /a HTTP/1.1 \r\nHost: h\r\n\r\n" + NEXT, []),
    "two spaces": (b"GET  /a HTTP/1.1\r\nHost: h\r\n\r\n" + NEXT, [A, THEN]),
    "tab in the first line": (b"GET\t/a HTTP/1.1\r\nHost: h\r\n\r\n" + NEXT, [A, THEN]),
}  # fmt: skip
# HAProxy alone: requests of HTTP/2 become those of HTTP/1.1.
HTTP2: dict[str, tuple[bytes, list[Read]]] = {
    "plain": (request(), [A]),
    "body": (request(body=b"abcd"), [FULL]),
    "body of a length": (request((b"content-length", b"4"), body=b"abcd"), [FULL]),
    "host beside the authority": (request((b"host", b"h")), [A]),
    "host and no authority": (request((b"host", b"h"), pseudo=PSEUDO[:3]), [A]),
    "neither host nor authority": (request(pseudo=PSEUDO[:3]), []),
    "host that is another one": (request((b"host", b"evil")), [A]),
    "authority with a user": (request(pseudo=with_pseudo(b":authority", b"h@evil")), []),
    "authority in a list": (request(pseudo=with_pseudo(b":authority", b"h, evil")), []),
    "path of another host": (request(pseudo=with_pseudo(b":path", b"http://evil/a")), []),
    "path without a slash": (request(pseudo=with_pseudo(b":path", b"a")), []),
    "path with a fragment": (request(pseudo=with_pseudo(b":path", b"/a#b")), []),
    "path of all": (request(pseudo=with_pseudo(b":path", b"*")), [("/", b"")]),  # for its routes as well
    "method that connects": (request(pseudo=with_pseudo(b":method", b"CONNECT")), []),
    "WebSocket": (request(pseudo=(*with_pseudo(b":method", b"CONNECT"), (b":protocol", b"websocket"))), [A]),
    "scheme of no server": (request(pseudo=with_pseudo(b":scheme", b"file")), [A]),
    "method twice": (request(pseudo=(*PSEUDO, (b":method", b"GET"))), []),
    "authority twice": (request(pseudo=(*PSEUDO, (b":authority", b"evil"))), []),
    "pseudo header in capitals": (request(pseudo=(*PSEUDO[:3], (b":Authority", b"h"))), []),
}  # fmt: skip
READ_WHOLE = ("plain", "length", "waits for a word, and sends", "refused", "HTTP/1.0 that is kept", "body")


class Readings:
    """The embedded plane's connections, before a handler that keeps what it gets."""

    def __init__(self) -> None:
        self.read: list[Read] = []
        self.names: set[str] = set()
        self.hosts: set[str] = set()
        self.repeated: set[str] = set()

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        message, headers = request._message, CIMultiDict(request.headers)
        if mistake := mistake_in(message.method, request.version, message.path, headers):
            return self._refused(mistake.status)
        if message.path.startswith("/missing"):
            return self._refused(404, close="expect" in headers)
        if "expect" in headers and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await request.read()
        self.read.append((message.path.removeprefix("http://h").removeprefix(":80"), body))
        self.names |= {name.lower() for name in headers}
        self.hosts.add(request.host)
        self.repeated |= head_of(request)[0].repeated
        answer = web.Response(text="ok")
        if message.chunked:
            answer.force_close()
        return answer

    @staticmethod
    def _refused(status: int, *, close: bool = False) -> web.Response:
        answer = web.Response(status=status)
        if close or status == 400:
            answer.force_close()
        return answer


@asynccontextmanager
async def reading(socket: Path) -> AsyncIterator[Readings]:
    readings = Readings()
    limits = Limits(head_seconds=20.0, body_seconds=20.0, idle_seconds=20.0)
    connections = Connections(readings, limits, [], lambda error: None)
    server = await asyncio.get_running_loop().create_unix_server(connections, socket)
    try:
        yield readings
    finally:
        server.close()
        await connections.shutdown(0.1)
        socket.unlink(missing_ok=True)


async def read_by(readings: Readings, socket: Path, sent: bytes) -> list[Read]:
    """Send bytes to a socket, and return what was read of them once the connection, or its one stream, has ended."""
    readings.read, got = [], bytearray()
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        async with asyncio.timeout(SECONDS):
            writer.write(sent)
            while not has_ended(got) and (piece := await reader.read(65536)):
                got += piece
    except ConnectionResetError:
        pass
    finally:
        writer.close()
    return readings.read


def has_ended(got: bytes) -> bool:
    """Return whether bytes of HTTP/2 have the answer of the one stream, or its end, or that of the connection."""
    if got.startswith(b"HTTP/1"):
        return False
    return any(kind == GOAWAY or (stream == 1 and kind in (HEADERS, RST_STREAM)) for kind, stream in frames(bytes(got)))


@pytest.fixture(scope="module")
def haproxy() -> Iterator[Haproxy]:
    with tempfile.TemporaryDirectory(prefix="haproxy-") as state, Haproxy.running(Path(state), SETTINGS) as found:
        yield found


def test_embedded_plane_reads_what_is_meant(tmp_path: Path) -> None:
    async def test() -> dict[str, list[Read]]:
        async with reading(tmp_path / "socket") as readings:
            found = {name: await read_by(readings, tmp_path / "socket", sent) for name, (sent, _) in CASES.items()}
            assert not readings.names & {"x-team"}
            assert readings.hosts <= {"h", "h:80"}
            assert readings.repeated == {"x-a"}
            return found

    check(asyncio.run(test()), CASES)


def test_planes_read_what_is_meant_behind_haproxy(haproxy: Haproxy) -> None:
    async def test() -> dict[str, list[Read]]:
        public = Path(haproxy.socket)
        async with reading(public.with_name("activator.sock")) as readings:
            found = {name: await read_by(readings, public, sent) for name, (sent, _) in CASES.items()}
            assert not readings.names & {"x-team", "content_length", "transfer_encoding"}
            assert readings.hosts <= {"h", "h:80"}
            assert readings.repeated == {"x-a"}
            return found

    check(asyncio.run(test()), CASES)


def test_request_of_http2_is_read_as_it_is_meant(haproxy: Haproxy) -> None:
    async def test() -> dict[str, list[Read]]:
        public = Path(haproxy.socket)
        async with reading(public.with_name("activator.sock")) as readings:
            found = {name: await read_by(readings, public, sent) for name, (sent, _) in HTTP2.items()}
            assert readings.hosts == {"h"}
            return found

    check(asyncio.run(test()), HTTP2)


def check(found: dict[str, list[Read]], cases: dict[str, tuple[bytes, list[Read]]]) -> None:
    meant = {name: iter(requests) for name, (_, requests) in cases.items()}
    wrong = {name: read for name, read in found.items() if not all(one in meant[name] for one in read)}
    assert not wrong
    whole = [name for name in READ_WHOLE if name in cases]
    assert [found[name] for name in whole] == [cases[name][1] for name in whole]
