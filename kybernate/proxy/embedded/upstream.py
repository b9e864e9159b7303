"""Passes one request to the address that it is for, and its answer back, both as they arrive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
from aiohttp import ClientResponse, web
from multidict import CIMultiDict
from yarl import URL

from kybernate.proxy.api_errors import Refusal
from kybernate.proxy.embedded.body import Body
from kybernate.proxy.embedded.exchange import Exchange
from kybernate.proxy.embedded.headers import passed_on
from kybernate.proxy.engine import Refused
from kybernate.proxy.models import CONNECT_SECONDS, FIRST_PAUSE, LONGEST_PAUSE, Ports
from kybernate.proxy.progress import SSE

KEPT_SECONDS: Final = 4.0  # uvicorn, which serves most models, closes connections that were idle for five
LINE: Final = 64 << 10
READ_BYTES: Final = 256 << 10
INNER_HEADER: Final = "X-Kybernate-Backend"


def session(socket: Path | None = None) -> aiohttp.ClientSession:
    """Return what connections to upstreams are kept in. It changes nothing of requests and answers.

    With `socket`, all of them are to that UNIX socket, whatever the address says.
    """
    connector = (
        aiohttp.UnixConnector(str(socket), limit=0, keepalive_timeout=KEPT_SECONDS)
        if socket
        else aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_SECONDS, use_dns_cache=True, ttl_dns_cache=5)
    )
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        read_bufsize=READ_BYTES,
        max_line_size=LINE,
        max_field_size=LINE,
    )


@dataclass(frozen=True)
class Inner:
    """The other data plane's own entrance, and the name there of each model that is reached through it."""

    client: aiohttp.ClientSession
    names: Mapping[str, str]


class Upstreams:
    """Passes requests on. `left` in its methods is the seconds that a request may still wait for a connection."""

    def __init__(self, client: aiohttp.ClientSession, send_seconds: float, inner: Inner | None = None) -> None:
        self._client = client
        self._send_seconds = send_seconds
        self._inner = inner
        self._ports = Ports()

    async def pass_on(
        self,
        exchange: Exchange,
        body: Body,
        content: bytes | None,
        base: str,
        headers: CIMultiDict[str],
        left: float,
        answered: Callable[[], None],
    ) -> web.StreamResponse:
        """Send a request to `base`, with `content` in place of its body where that is not None; return its answer.

        Raises Refused where there is none. What breaks after the answer has begun ends the client's connection.
        """
        exchange.passed = time.monotonic()
        async with self._answer_of(exchange, body, content, base, headers, left) as response:
            answered()
            if exchange.answer is not None:
                return await self._into_stream(exchange, response)
            answer = await exchange.begin(response.status, passed_on(CIMultiDict(response.headers)), response.reason)
            return await self._copy(exchange, response, answer)

    @asynccontextmanager
    async def _answer_of(
        self, exchange: Exchange, body: Body, content: bytes | None, base: str, headers: CIMultiDict[str], left: float
    ) -> AsyncIterator[ClientResponse]:
        end, pause = time.monotonic() + left, FIRST_PAUSE
        client, url = self._client, URL(base + exchange.target, encoded=True)
        if self._inner is not None and (name := self._inner.names.get(exchange.through)):
            client, url = self._inner.client, URL(f"http://inner{exchange.target}", encoded=True)
            headers[INNER_HEADER] = name
        while True:
            if content is None and body.exists and body.whole:
                content = bytes(body.prefix)
            if content is not None:
                headers["Content-Length"] = str(len(content))
            data = content if content is not None else body.stream() if body.exists else None
            try:
                response = await client.request(
                    exchange.head.method, url, headers=headers, data=data, allow_redirects=False
                )
                break
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                if body.sent:
                    raise Refused(_unreachable(base, error)) from error
                await asyncio.sleep(pause)  # the port may accept, and this connection be refused by another limit
                pause = min(2 * pause, LONGEST_PAUSE)
                await self._until_accepting(base, end - time.monotonic(), error)
            except aiohttp.ClientError as error:
                if body.refusal is not None:
                    raise Refused(body.refusal) from error
                words = f"{base} ended the connection without an answer, and the request is not sent twice: {error}"
                raise Refused(Refusal(502, "upstream_failed", words)) from error
            except RuntimeError as error:
                if not client.closed:
                    raise
                raise Refused(Refusal(503, "proxy_stopped", "the proxy is being stopped", 1.0)) from error
            except UnicodeError as error:
                raise Refused(Refusal(400, "bad_request", "a header has bytes that are no text")) from error
        try:
            yield response
        finally:
            response.close() if not response.content.at_eof() else response.release()

    async def _until_accepting(self, base: str, left: float, error: Exception) -> None:
        try:
            async with asyncio.timeout(left):
                await self._ports.accepts(base)
        except TimeoutError:
            raise Refused(_unreachable(base, error)) from error

    async def _copy(
        self, exchange: Exchange, response: ClientResponse, answer: web.StreamResponse
    ) -> web.StreamResponse:
        try:
            async for piece in response.content.iter_any():
                exchange.sent += len(piece)
                await self._send(exchange, answer, piece)
            await answer.write_eof()
        except aiohttp.ClientError:
            exchange.reason = "upstream_broke"
            return exchange.abort()
        return answer

    async def _send(self, exchange: Exchange, answer: web.StreamResponse, piece: bytes) -> None:
        """Write to the client; one that takes nothing for so long is cut off."""
        try:
            async with asyncio.timeout(self._send_seconds):
                await answer.write(piece)
        except TimeoutError:
            exchange.reason = "client_slow"
            exchange.abort()
            raise ConnectionResetError from None

    async def _into_stream(self, exchange: Exchange, response: ClientResponse) -> web.StreamResponse:
        """Continue a stream that began with progress; an answer that is no stream becomes its error."""
        assert exchange.answer is not None
        if response.status == 200 and response.content_type == SSE:
            return await self._copy(exchange, response, exchange.answer)
        text = (await response.content.read(2048)).decode("utf-8", "replace")
        raise Refused(Refusal(response.status if response.status >= 400 else 502, "upstream_refused", text))


def _unreachable(base: str, error: Exception) -> Refusal:
    return Refusal(503, "upstream_unreachable", f"no connection to {base}: {error}", 1.0)
