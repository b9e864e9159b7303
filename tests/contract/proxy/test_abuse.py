"""Requests that two servers may read differently, and clients that take more than their part."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from kybernate.proxy.holding import Phase
from tests.contract.proxy.conftest import Standing

TO_QWEN = "routes: [{to: qwen}]"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
# Those that HAProxy writes again in one form, so that no two readers differ. What follows UNFOLDED is a request then.
REWRITTEN = {"length and chunks", "chunks and length"}
UNFOLDED = {"folded header", "folded coding", "bare line feed in a header"}
# Each is a first request whose end two readers may see at different places, or that hides another one.
POST = b"POST /a HTTP/1.1\r\nHost: h\r\n"
SMUGGLING = {
    "length and chunks": POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 0\r\nContent-Length: 38\r\n\r\n",
    "two lengths in a list": POST + b"Content-Length: 0, 38\r\n\r\n",
    "length with a sign": POST + b"Content-Length: +0\r\n\r\n",
    "negative length": POST + b"Content-Length: -1\r\n\r\n",
    "hexadecimal length": POST + b"Content-Length: 0x0\r\n\r\n",
    "length with a space inside": POST + b"Content-Length: 0 0\r\n\r\n",
    "enormous length": POST + b"Content-Length: 99999999999999999999999\r\n\r\n",
    "space before the colon": POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "tab before the colon": POST + b"Content-Length\t: 0\r\n\r\n",
    "folded header": POST + b"X-A: 1\r\n Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "folded coding": POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "coding after chunked": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "chunked twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "quoted coding": POST + b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n',
    "vertical tab in the coding": POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": b"POST /a HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "bare line feed in a header": POST + b"X-A: 1\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "bare carriage return": POST + b"X-A: 1\rTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "zero byte in a header": POST + b"X-A: 1\x00\r\n\r\n",
    "header without a name": POST + b": x\r\n\r\n",
    "header without a colon": POST + b"X-A\r\n\r\n",
    "chunk size with a sign": POST + b"Transfer-Encoding: chunked\r\n\r\n+0\r\n\r\n",
    "chunk size with 0x": POST + b"Transfer-Encoding: chunked\r\n\r\n0x0\r\n\r\n",
    "chunk size that overflows": POST + b"Transfer-Encoding: chunked\r\n\r\n10000000000000000\r\n\r\n",
    "chunk without its end": POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n",
    "two hosts": b"GET /a HTTP/1.1\r\nHost: h\r\nHost: evil\r\n\r\n",
    "no host": b"GET /a HTTP/1.1\r\n\r\n",
    "host with a space": b"GET /a HTTP/1.1\r\nHost: h evil\r\n\r\n",
    "host with a slash": b"GET /a HTTP/1.1\r\nHost: h/evil\r\n\r\n",
    "space in the target": b"GET /a b HTTP/1.1\r\nHost: h\r\n\r\n",
    "unknown version": b"GET /a HTTP/1.9\r\nHost: h\r\n\r\n",
    "space before the method": b" GET /a HTTP/1.1\r\nHost: h\r\n\r\n",
    "no version": b"GET /a\r\n\r\n",
    "method of strange bytes": b"G\x80T /a HTTP/1.1\r\nHost: h\r\n\r\n",
}  # fmt: skip


@pytest.mark.parametrize("name", SMUGGLING)
async def test_request_that_hides_another_is_refused(standing_proxy: Standing, name: str) -> None:
    """Neither it nor what follows on its connection reaches the model."""
    async with standing_proxy(TO_QWEN, phase=Phase.AWAKE) as stand:
        answer = await asyncio.wait_for(stand.raw(SMUGGLING[name] + SMUGGLED), 20)
        if stand.plane == "haproxy" and name in REWRITTEN | UNFOLDED:
            for one in stand.upstream.seen:
                names = {header.lower() for header in one["names"]}
                assert not {"content-length", "transfer-encoding"} <= names
                assert not any("\n" in value or "\r" in value for value in one["headers"].values())
            assert name in UNFOLDED or [one["path"] for one in stand.upstream.seen] == ["/a"]
            return
        first = answer.partition(b"\r\n")[0]
        assert not answer or first.split(b" ")[1] in (b"400", b"413", b"501", b"505"), first
        assert not [one for one in stand.upstream.seen if one["path"].startswith("/smuggled")]
        assert answer.count(b"HTTP/1.1 ") <= 1


async def test_head_that_is_too_large_is_refused(standing_proxy: Standing) -> None:
    async with standing_proxy(TO_QWEN, phase=Phase.AWAKE) as stand:
        for request in (
            b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: h\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: h\r\nX-A: " + b"a" * 70_000 + b"\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: h\r\n" + b"X-A: a\r\n" * 2000 + b"\r\n",
        ):
            answer = await stand.raw(request)
            assert not answer or answer.split(b" ")[1] in (b"400", b"414", b"431")
        assert not stand.upstream.seen


async def test_body_that_is_too_large_is_refused(standing_proxy: Standing) -> None:
    async with standing_proxy(TO_QWEN, top="limits: {body: 1KiB}", phase=Phase.AWAKE) as stand:
        answer = await stand.client.post(f"{stand.url}/sink", data=bytes(2048))
        assert answer.status == 413
        chunked = await stand.raw(
            b"POST /sink HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n800\r\n"
            + bytes(0x800) + b"\r\n0\r\n\r\n"
        )  # fmt: skip
        assert chunked.split(b" ")[1] == b"413"


async def test_client_that_sends_its_head_slowly_is_cut_off(standing_proxy: Standing) -> None:
    async with standing_proxy(TO_QWEN, top="limits: {head_seconds: 200ms}", phase=Phase.AWAKE) as stand:
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: h\r\nX-A: ")
        answer = await reader.read()  # ends only because the proxy closes
        assert answer.split(b" ")[1] == b"408"
        writer.close()


async def test_client_that_sends_its_body_slowly_is_cut_off(standing_proxy: Standing) -> None:
    async with standing_proxy(TO_QWEN, top="limits: {body_seconds: 200ms}", phase=Phase.AWAKE) as stand:
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
        writer.write(b"POST /sink HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\nabc")
        answer = await reader.read()
        assert not answer or answer.split(b" ")[1] in (b"400", b"408", b"504")
        writer.close()
        await stand.until(lambda: not stand.upstream.running, "the upstream is free again")


async def test_client_that_reads_slowly_is_cut_off(standing_proxy: Standing) -> None:
    async with standing_proxy(TO_QWEN, top="limits: {send_seconds: 300ms}", phase=Phase.AWAKE) as stand:
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.port, limit=1024)
        writer.write(b"GET /big?bytes=268435456 HTTP/1.1\r\nHost: h\r\n\r\n")
        await stand.until(lambda: stand.upstream.running == 1)
        await stand.until(lambda: not stand.upstream.running, "the upstream is free again")
        writer.close()
        assert reader is not None


async def test_connections_of_one_client_are_limited(standing_proxy: Standing) -> None:
    async with standing_proxy(TO_QWEN, top="limits: {per_client: 3}", phase=Phase.AWAKE) as stand:
        kept = [await asyncio.open_connection("127.0.0.1", stand.port) for _ in range(3)]
        for reader, writer in kept:
            writer.write(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        try:
            answer = await stand.raw(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        except ConnectionResetError:
            answer = b""  # HAProxy closes such a connection without reading the request
        assert (not answer) if stand.plane == "haproxy" else answer.split(b" ")[1] == b"429"
        kept.pop()[1].close()
        for _ in range(500):
            with suppress(ConnectionResetError):
                if b" 200 " in (await stand.raw(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"))[:20]:
                    break
            await asyncio.sleep(0.01)
        else:
            raise AssertionError("no place is free although a connection has ended")
        for _, writer in kept:
            writer.close()


async def test_requests_one_after_the_other_on_one_connection_stay_apart(standing_proxy: Standing) -> None:
    async with standing_proxy(TO_QWEN, phase=Phase.AWAKE) as stand:
        request = b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n"
        last = b"GET /9 HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
        answer = await stand.raw(b"".join(request % number for number in range(9)) + last)
        assert answer.count(b"HTTP/1.1 200") == 10
        assert [one["path"] for one in stand.upstream.seen] == [f"/{number}" for number in range(10)]


async def test_defects_of_requests_have_a_form(embedded_proxy: Standing) -> None:
    async with embedded_proxy(TO_QWEN, phase=Phase.AWAKE) as stand:
        answer = await stand.raw(b"nonsense\r\n\r\n")
        assert answer.startswith(b"HTTP/1.")
        assert b"400" in answer.partition(b"\r\n")[0]
        assert b'"bad_request"' in answer


async def test_what_needs_http2_is_refused_by_name(embedded_proxy: Standing) -> None:
    async with embedded_proxy(TO_QWEN, phase=Phase.AWAKE) as stand:
        grpc = await stand.client.post(f"{stand.url}/pkg.S/M", data=b"x", headers={"Content-Type": "application/grpc"})
        assert (grpc.status, "haproxy" in await grpc.text()) == (501, True)
        trailers = await stand.client.post(f"{stand.url}/x", data=b"x", headers={"Trailer": "X-Sum"})
        assert (trailers.status, "haproxy" in await trailers.text()) == (501, True)
        preface = await stand.raw(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert preface.startswith(b"HTTP/1.")
        assert b"haproxy" in preface


@pytest.mark.parametrize("before", [b"", b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"], ids=["first", "second"])
async def test_head_that_comes_byte_by_byte_is_cut_off(standing_proxy: Standing, before: bytes) -> None:
    """Bytes prolong nothing, neither of the first head of a connection nor of one after an answer."""
    limits = "limits: {head_seconds: 300ms, idle_seconds: 300ms}"
    async with standing_proxy(TO_QWEN, top=limits, phase=Phase.AWAKE) as stand:
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
        writer.write(before)
        ended = asyncio.ensure_future(reader.read())
        with suppress(ConnectionError):
            writer.write(b"GET / HTTP/1.1\r\nHost: h\r\nX-A: ")
            while not ended.done():  # the time limit of the test ends this if bytes prolong it
                writer.write(b"a")
                await asyncio.wait((ended,), timeout=0.02)
        with suppress(ConnectionError):
            assert (await ended).count(b"HTTP/1.1 200") == bool(before)
        writer.close()
        assert len(stand.upstream.seen) == bool(before)


async def test_client_with_many_connections_leaves_room_for_others(standing_proxy: Standing) -> None:
    async with standing_proxy(TO_QWEN, top="limits: {per_client: 20}", phase=Phase.AWAKE) as stand:
        kept = []
        for _ in range(200):
            with suppress(ConnectionError):
                kept.append(await asyncio.open_connection("127.0.0.1", stand.port))
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.port, local_addr=("127.0.0.2", 0))
        writer.write(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        for _, one in [*kept, (reader, writer)]:
            one.close()
