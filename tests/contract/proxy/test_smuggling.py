"""More of what hides a second request: codings in disguise, bodies that are not read, trailers, upgrades, HTTP/2."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from kybernate.proxy.haproxy.generated import ACTIVATOR
from kybernate.proxy.holding import Phase
from tests.contract.proxy.conftest import Standing
from tests.contract.proxy.stand import Stand, standing
from tests.contract.proxy.test_abuse import POST, SMUGGLED, TO_QWEN

ENDED = b"0\r\n\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n"
# Requests of which neither they nor what follows may reach the model: two readers may see their ends at two places.
DISGUISED = {
    "letter that is no ASCII": POST + b"Transfer-Encoding: chun\xe2\x84\xaaed\r\n\r\n" + ENDED,
    "form feed after the coding": POST + b"Transfer-Encoding: chunked\x0c\r\n\r\n" + ENDED,
    "hard space after the coding": POST + b"Transfer-Encoding: chunked\xa0\r\n\r\n" + ENDED,
    "parameter of the coding": POST + b"Transfer-Encoding: chunked;q=1\r\n\r\n" + ENDED,
    "identity": POST + b"Transfer-Encoding: identity\r\nContent-Length: 0\r\n\r\n",
    "coding that is cut in two": POST + b"Transfer-Encoding: chu\r\n nked\r\n\r\n" + ENDED,
    "two codings in a line": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + ENDED,
    "coding of a space": POST + b"Transfer-Encoding: \r\nContent-Length: 38\r\n\r\n",
    "digits that are no ASCII": POST + b"Content-Length: \xd9\xa0\r\n\r\n",
    "length with an underscore": POST + b"Content-Length: 3_8\r\n\r\n",
    "length with a point": POST + b"Content-Length: 0.0\r\n\r\n",
    "length that is empty": POST + b"Content-Length: \r\n\r\n",
    "chunk size of nothing": CHUNKED + b"\r\n\r\n" + ENDED,
    "chunk size in words": CHUNKED + b"\r\nzero\r\n\r\n" + ENDED,
    "negative chunk size": CHUNKED + b"\r\n-1\r\n\r\n" + ENDED,
    "chunk size with an underscore": CHUNKED + b"\r\n1_0\r\n" + bytes(16) + b"\r\n" + ENDED,
    "line feeds in place of line ends": CHUNKED + b"\r\n1\na\n0\n\n",
    "line feed in an extension": CHUNKED + b"\r\n1;a\nb\r\nx\r\n" + ENDED,
}
# Those that HAProxy may write again in one form: one reader takes them as they are, and no two readers differ.
ONE_FORM = {"identity", "coding that is cut in two", "coding of a space", "line feeds in place of line ends"}


@pytest.mark.parametrize("name", DISGUISED)
async def test_disguised_end_of_a_body_hides_no_request(standing_proxy: Standing, name: str) -> None:
    async with standing_proxy(TO_QWEN, phase=Phase.AWAKE) as stand:
        answer = await asyncio.wait_for(stand.raw(DISGUISED[name] + SMUGGLED), 20)
        if stand.plane == "haproxy" and name in ONE_FORM:
            assert all(not is_ambiguous(one["names"]) for one in stand.upstream.seen)
            return
        first = answer.partition(b"\r\n")[0]
        assert not answer or first.split(b" ")[1] in (b"400", b"413", b"422", b"501"), first
        assert not [one for one in stand.upstream.seen if one["path"].startswith("/smuggled")]


async def test_enormous_extension_of_a_chunk_is_bounded_by_time(standing_proxy: Standing) -> None:
    """It is no body, so its client has sent none for too long; nothing of it is kept."""
    async with standing_proxy(TO_QWEN, top="limits: {body_seconds: 500ms}", phase=Phase.AWAKE) as stand:
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
        writer.write(CHUNKED + b"\r\n1;")
        ended = asyncio.ensure_future(reader.read())
        with suppress(ConnectionError):
            while not ended.done():
                writer.write(b"a" * 65536)
                await writer.drain()
                await asyncio.wait((ended,), timeout=0.01)
        with suppress(ConnectionError):
            answer = await ended
            assert not answer or answer.split(b" ")[1] in (b"400", b"408", b"413", b"502", b"504")
        writer.close()
        assert not stand.upstream.seen


async def test_trailer_is_no_header_of_the_next_request(standing_proxy: Standing) -> None:
    """HAProxy has one connection to the activator for requests of several clients, and passes their trailers there."""
    forged = CHUNKED + b"\r\n1\r\na\r\n0\r\nX-Forwarded-For: 1.2.3.4\r\n\r\n"
    plain = CHUNKED + b"\r\n1\r\nb\r\n0\r\n\r\n"
    async with standing_proxy(TO_QWEN, phase=Phase.AWAKE) as stand:
        for _ in range(4):
            reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
            for request in (plain, forged, plain, forged, plain):
                with suppress(ConnectionError, asyncio.IncompleteReadError, RuntimeError):  # it was the last
                    writer.write(request)
                    head = await reader.readuntil(b"\r\n\r\n")
                    size = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                    await reader.readexactly(int(size.partition(b":")[2]))
            writer.close()
            await stand.raw(plain.replace(b"Host: h", b"Host: h\r\nConnection: close"))
        assert len(stand.upstream.seen) == (24 if stand.plane == "haproxy" else 8)
        assert not [one for one in stand.upstream.seen if "1.2.3.4" in str(one["headers"])]


def is_ambiguous(names: list[str]) -> bool:
    lower = [name.lower() for name in names]
    return "transfer-encoding" in lower and "content-length" in lower


async def test_body_of_a_refused_request_is_no_request(standing_proxy: Standing, tmp_path: Path) -> None:
    """Its connection is closed, or its body is read and forgotten: whatever it was refused for."""
    (tmp_path / "keys").write_text(f"alice {'0' * 64}\n")
    routes = f"routes: [{{path: /keys, keys: {tmp_path}/keys, to: qwen}}, {{path: /v1}}, {{path: /to, to: qwen}}]"
    async with standing_proxy(routes, model="retry_after: 1h") as stand:
        stand.models.failure = "no room"
        for path in (b"/keys", b"/nowhere", b"/v1/chat/completions", b"/to"):
            for more in (b"", b"Expect: 100-continue\r\n", b"Content-Type: application/json\r\n"):
                head = b"POST " + path + b" HTTP/1.1\r\nHost: h\r\n" + more
                answer = await stand.raw(head + b"Content-Length: %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED + SMUGGLED)
                assert answer.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").split(b" ")[1] in (
                    b"400", b"401", b"404", b"503",
                )  # fmt: skip
        assert not stand.upstream.seen
        stand.models.failure = ""


async def test_body_of_a_request_that_has_none_by_nature_is_its_body(standing_proxy: Standing) -> None:
    async with standing_proxy(TO_QWEN, phase=Phase.AWAKE) as stand:
        for method in (b"GET", b"HEAD", b"DELETE", b"OPTIONS"):
            head = method + b" /a HTTP/1.1\r\nHost: h\r\nConnection: close\r\n"
            await stand.raw(head + b"Content-Length: %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED)
        assert {one["path"] for one in stand.upstream.seen} <= {"/a"}


class Raw:
    """An upstream that keeps all bytes that it gets, and answers each head that it sees with `answer`."""

    def __init__(self, answer: bytes) -> None:
        self.got = bytearray()
        self._answer = answer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen = 0
        with suppress(ConnectionError):
            while piece := await reader.read(65536):
                self.got += piece
                while seen < self.got.count(b"\r\n\r\n"):
                    seen += 1
                    writer.write(self._answer)
                    await writer.drain()
        writer.close()


@asynccontextmanager
async def raw_upstream(answer: bytes) -> AsyncIterator[tuple[Raw, int]]:
    raw = Raw(answer)
    server = await asyncio.start_server(raw.serve, "127.0.0.1", 0)
    async with server:
        yield raw, server.sockets[0].getsockname()[1]


def to_raw(port: int) -> str:
    return f"  raw: {{upstream: 'http://127.0.0.1:{port}'}}\nroutes: [{{to: raw}}]"


UPGRADE = (
    b"GET /ws HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)
REFUSED = (
    b"HTTP/1.1 426 Upgrade Required\r\nContent-Length: 3\r\n\r\nnot",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nnot\r\n0\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 404 Not Found\r\nContent-Length: 3\r\n\r\nnot",
)


@pytest.mark.parametrize("refusal", REFUSED)
async def test_upgrade_that_is_refused_opens_no_tunnel(standing_proxy: Standing, refusal: bytes) -> None:
    """What its client sends afterwards is no request of the model's, past routes and keys."""
    async with raw_upstream(refusal) as (raw, port), standing_proxy(to_raw(port)) as stand:
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
        writer.write(UPGRADE + b"\r\n" + SMUGGLED)
        while not (line := await reader.readline()).startswith(b"HTTP/1.1 ") or b" 103 " in line:
            assert line
        assert line.split(b" ")[1] == refusal.rpartition(b"HTTP/1.1 ")[2][:3]
        writer.write(SMUGGLED)
        await reader.read()
        writer.close()
        assert b"/smuggled" not in passed_as_tunnel(bytes(raw.got))


def passed_as_tunnel(got: bytes) -> bytes:
    """Return what came without being a request that the proxy has passed: those have an id."""
    heads = got.split(b"\r\n\r\n")
    return b"".join(head for head in heads if b"x-request-id" not in head.lower())


async def test_upgrade_to_http2_is_not_passed_on(standing_proxy: Standing) -> None:
    """In its tunnel, requests would pass neither routes nor keys."""
    switching = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    async with raw_upstream(switching) as (raw, port), standing_proxy(to_raw(port)) as stand:
        for connection in (b"Upgrade, HTTP2-Settings", b"Upgrade"):
            head = b"GET /a HTTP/1.1\r\nHost: h\r\nConnection: " + connection + b"\r\nUpgrade: h2c\r\n"
            raw.got.clear()
            reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
            writer.write(head + b"HTTP2-Settings: AAMAAABk\r\n\r\nPRI * HTTP/2.0\r\n\r\n")
            await stand.until(lambda reader=reader: b"GET /a" in raw.got or reader.at_eof())
            writer.close()
        assert b"h2c" not in raw.got.lower()
        assert b"PRI *" not in raw.got


async def test_upgrade_with_a_body_is_passed_as_a_request(standing_proxy: Standing) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    async with raw_upstream(answer) as (raw, port), standing_proxy(to_raw(port)) as stand:
        for framing, body in (
            (b"Content-Length: %d\r\n" % len(SMUGGLED), SMUGGLED),
            (b"Transfer-Encoding: chunked\r\n", b"%x\r\n" % len(SMUGGLED) + SMUGGLED + b"\r\n0\r\n\r\n"),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
            writer.write(UPGRADE + framing + b"\r\n" + body)
            assert (await reader.readline()).split(b" ")[1] in (b"200", b"400", b"501")
            writer.close()
        assert raw.got.count(b"GET /smuggled") <= raw.got.count(b"GET /ws")
        for head in raw.got.split(b"GET /ws")[1:]:
            framed = head.partition(b"\r\n\r\n")[0].lower()
            assert (b"content-length: " in framed) != (b"transfer-encoding: chunked" in framed)


TRAILERS = {
    "length": b"Content-Length: 38\r\n",
    "coding": b"Transfer-Encoding: chunked\r\n",
    "host": b"Host: evil\r\n",
    "key": b"Authorization: Bearer evil\r\n",
    "where it comes from": b"X-Forwarded-For: 1.2.3.4\r\n",
    "many": b"X-A: b\r\n" * 5000,
    "long": b"X-A: " + b"b" * 200_000 + b"\r\n",
    "without a colon": b"X-A\r\n",
    "bare line feed": b"X-A: b\nContent-Length: 38\r\n",
}


@pytest.mark.parametrize("name", TRAILERS)
async def test_trailers_are_no_headers_of_the_request(standing_proxy: Standing, name: str) -> None:
    """They are left out, or the request is refused; what follows is a request of its own or nothing."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    async with raw_upstream(answer) as (raw, port), standing_proxy(to_raw(port)) as stand:
        with suppress(ConnectionError):
            await asyncio.wait_for(
                stand.raw(CHUNKED + b"\r\n1\r\na\r\n0\r\n" + TRAILERS[name] + b"\r\n" + SMUGGLED), 20
            )
        got = bytes(raw.got)
        assert TRAILERS[name] not in got
        assert b"evil" not in got
        assert b"1.2.3.4" not in got
        assert b"/smuggled" not in passed_as_tunnel(got)


# ---- HTTP/2, whose requests become those of HTTP/1.1

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, GOAWAY = 0, 1, 3, 4, 7
END_STREAM, END_HEADERS = 1, 4
Field = tuple[bytes, bytes]
PSEUDO: tuple[Field, ...] = (
    (b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a"), (b":authority", b"h"),
)  # fmt: skip


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def literal(name: bytes, value: bytes) -> bytes:
    """Return a field that is in no table, as HPACK writes it without Huffman's code."""
    return b"\x00" + length(name) + name + length(value) + value


def length(text: bytes) -> bytes:
    if len(text) < 127:
        return bytes((len(text),))
    rest, found = len(text) - 127, [127]
    while rest >= 128:
        found.append(rest % 128 + 128)
        rest //= 128
    return bytes([*found, rest])


def request(*fields: Field, pseudo: tuple[Field, ...] = PSEUDO, body: bytes | None = None) -> bytes:
    head = b"".join(literal(*one) for one in (*pseudo, *fields))
    flags = END_HEADERS if body is not None else END_HEADERS | END_STREAM
    sent = PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, flags, 1, head)
    return sent + (frame(DATA, END_STREAM, 1, body) if body is not None else b"")


def with_pseudo(name: bytes, value: bytes) -> tuple[Field, ...]:
    return tuple((one, value if one == name else old) for one, old in PSEUDO)


HIDDEN = b"GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n"
DOWNGRADED = {
    "coding": request((b"transfer-encoding", b"chunked"), body=ENDED + HIDDEN),
    "length that is too small": request((b"content-length", b"0"), body=HIDDEN),
    "length that is too large": request((b"content-length", b"999"), body=HIDDEN),
    "two lengths": request((b"content-length", b"0"), (b"content-length", b"36"), body=HIDDEN),
    "line end in a value": request((b"x-a", b"b\r\ntransfer-encoding: chunked"), body=ENDED + HIDDEN),
    "line feed in a value": request((b"x-a", b"b\ntransfer-encoding: chunked"), body=ENDED + HIDDEN),
    "zero byte in a value": request((b"x-a", b"b\x00c")),
    "line end in a name": request((b"x-a: b\r\ntransfer-encoding", b"chunked"), body=ENDED + HIDDEN),
    "colon in a name": request((b"transfer-encoding: chunked\r\nx", b"y"), body=ENDED + HIDDEN),
    "space in a name": request((b"transfer-encoding ", b"chunked"), body=ENDED + HIDDEN),
    "capitals in a name": request((b"Transfer-Encoding", b"chunked"), body=ENDED + HIDDEN),
    "empty name": request((b"", b"b")),
    "header of one connection": request((b"connection", b"x-a"), (b"x-a", b"1")),
    "line end in the path": request(pseudo=with_pseudo(b":path", b"/a HTTP/1.1\r\nHost: h\r\n\r\nGET /smuggled")),
    "space in the path": request(pseudo=with_pseudo(b":path", b"/a HTTP/1.1 /smuggled")),
    "empty path": request(pseudo=with_pseudo(b":path", b"")),
    "path of another host": request(pseudo=with_pseudo(b":path", b"@evil/smuggled")),
    "line end in the method": request(pseudo=with_pseudo(b":method", b"GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\nPOST")),
    "space in the method": request(pseudo=with_pseudo(b":method", b"GET /smuggled HTTP/1.1 ")),
    "line end in the host": request(pseudo=with_pseudo(b":authority", b"h\r\nx-a: b")),
    "slash in the host": request(pseudo=with_pseudo(b":authority", b"h/smuggled")),
    "scheme with a line end": request(pseudo=with_pseudo(b":scheme", b"http://h/smuggled HTTP/1.1\r\nx: y")),
    "two paths": request(pseudo=(*PSEUDO, (b":path", b"/smuggled"))),
    "two hosts": request((b"host", b"h"), (b"host", b"evil")),
    "pseudo header after the others": request((b"x-a", b"b"), (b":path", b"/smuggled")),
    "unknown pseudo header": request(pseudo=(*PSEUDO, (b":smuggled", b"x"))),
    "no method": request(pseudo=PSEUDO[1:]),
    "status in a request": request(pseudo=(*PSEUDO, (b":status", b"200"))),
    "trailers with a pseudo header": request(body=b"a")[: -len(frame(DATA, END_STREAM, 1, b"a"))]
    + frame(DATA, 0, 1, b"a") + frame(HEADERS, END_HEADERS | END_STREAM, 1, literal(b":path", b"/smuggled")),
    "trailers with a length": request(body=b"a")[: -len(frame(DATA, END_STREAM, 1, b"a"))]
    + frame(DATA, 0, 1, b"a") + frame(HEADERS, END_HEADERS | END_STREAM, 1, literal(b"content-length", b"36")),
}  # fmt: skip


def frames(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield kind and stream of each whole frame."""
    while len(data) >= 9 and len(data) >= 9 + (size := int.from_bytes(data[:3], "big")):
        yield data[3], int.from_bytes(data[5:9], "big")
        data = data[9 + size :]


@pytest.mark.parametrize("name", DOWNGRADED)
async def test_request_of_http2_hides_no_request_of_http1(tmp_path: Path, name: str) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    haproxy = partial(standing, plane="haproxy", place=tmp_path)
    async with raw_upstream(answer) as (raw, port), haproxy(to_raw(port)) as stand:
        await passing(stand)
        raw.got.clear()
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
        writer.write(DOWNGRADED[name])
        got = bytearray()
        async with asyncio.timeout(20):
            while piece := await reader.read(65536):
                got += piece
                if {kind for kind, stream in frames(got) if stream == 1 or kind == GOAWAY} & {
                    HEADERS, RST_STREAM, GOAWAY,
                }:  # fmt: skip
                    break
        writer.close()
        heads = bytes(raw.got).split(b"\r\n\r\n")
        assert b"/smuggled" not in passed_as_tunnel(bytes(raw.got)), raw.got
        assert not [head for head in heads if b"x-a: b" in head.lower() and b"transfer-encoding" in head.lower()]
        for head in heads:
            line = head.partition(b"\r\n")[0]
            assert line.count(b" ") in (0, 2), line
            assert b"evil" not in head


async def passing(stand: Stand) -> None:
    """Wait until HAProxy passes the requests of the model, which is always awake, by itself."""
    await stand.until(lambda: stand.service.plane is not None and stand.service.plane._wanted["raw"] != ACTIVATOR)
