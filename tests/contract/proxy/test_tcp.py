"""Ports without HTTP, which the embedded plane serves whatever the plane of HTTP is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kybernate.proxy.embedded.tcp import MAGIC
from kybernate.proxy.holding import Phase
from tests.contract.proxy.conftest import Standing


class Echo:
    """Answers each line; `got` has the bytes of each connection."""

    def __init__(self) -> None:
        self.got: list[bytearray] = []
        self.open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine = bytearray()
        self.got.append(mine)
        self.open += 1
        try:
            while piece := await reader.read(65536):
                mine += piece
                writer.write(b"echo " + piece)
                await writer.drain()
            writer.write(b"end")
            writer.close()
        finally:
            self.open -= 1


@asynccontextmanager
async def echoing() -> AsyncIterator[tuple[Echo, int]]:
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    try:
        yield echo, server.sockets[0].getsockname()[1]
    finally:
        server.close()


def route(port: int, more: str = "", model: str = "") -> str:
    return (
        f"  db: {{container: db, upstream: 'tcp://127.0.0.1:{port}'{model}}}\n"
        f"tcp: [{{listen: '127.0.0.1:0', to: db{more}}}]\n"
    )


async def test_first_connection_wakes_and_held_bytes_go_on(embedded_proxy: Standing) -> None:
    async with echoing() as (echo, port), embedded_proxy(route(port)) as stand:
        stand.models.may_wake.clear()
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.service.tcp_ports[0])
        writer.write(b"hello")
        await stand.until(lambda: stand.held("db").waiting)
        assert not echo.got
        stand.models.may_wake.set()
        assert await reader.readexactly(10) == b"echo hello"
        writer.write_eof()
        assert await reader.read() == b"end"
        assert bytes(echo.got[-1]) == b"hello"
        writer.close()


async def test_open_connection_is_activity(embedded_proxy: Standing) -> None:
    async with echoing() as (_, port), embedded_proxy(route(port, model=", idle: 30ms")) as stand:
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.service.tcp_ports[0])
        writer.write(b"one")
        assert await reader.readexactly(8) == b"echo one"
        await asyncio.sleep(0.15)  # five times what an idle model has, as nothing must happen
        assert stand.models.calls["suspend db"] == 0
        writer.close()
        await stand.until(lambda: stand.models.calls["suspend db"] == 1)


async def test_probe_that_only_connects_wakes_nothing(embedded_proxy: Standing) -> None:
    async with echoing() as (_, port), embedded_proxy(route(port, ", wake_on: data")) as stand:
        _, writer = await asyncio.open_connection("127.0.0.1", stand.service.tcp_ports[0])
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.service.tcp_ports[0])
        assert not stand.models.calls
        writer.write(b"x")
        assert await reader.readexactly(6) == b"echo x"
        assert stand.models.calls["wake db"] == 1
        writer.close()


async def test_client_that_hangs_up_leaves_the_queue(embedded_proxy: Standing) -> None:
    async with echoing() as (_, port), embedded_proxy(route(port)) as stand:
        stand.models.may_wake.clear()
        _, writer = await asyncio.open_connection("127.0.0.1", stand.service.tcp_ports[0])
        await stand.until(lambda: stand.held("db").waiting)
        writer.close()
        await stand.until(lambda: not stand.held("db").waiting)


async def test_upstream_learns_the_client_by_the_proxy_protocol(embedded_proxy: Standing) -> None:
    async with echoing() as (echo, port), embedded_proxy(route(port, ", proxy_protocol: true")) as stand:
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.service.tcp_ports[0])
        own = writer.get_extra_info("sockname")[1]
        writer.write(b"x")
        await reader.readexactly(6)
        header = await stand.until(lambda: next((bytes(one) for one in echo.got if one.endswith(b"x")), b""))
        assert header.startswith(MAGIC + b"\x21\x11\x00\x0c" + b"\x7f\x00\x00\x01" * 2 + own.to_bytes(2, "big"))
        writer.close()


async def test_wake_that_fails_closes_the_connection(embedded_proxy: Standing) -> None:
    async with echoing() as (_, port), embedded_proxy(route(port)) as stand:
        stand.models.failure = "broken"
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.service.tcp_ports[0])
        assert await reader.read() == b""
        writer.close()


async def test_http_of_the_same_proxy_is_untouched(embedded_proxy: Standing) -> None:
    async with echoing() as (_, port), embedded_proxy(route(port), phase=Phase.AWAKE) as stand:
        assert (await stand.chat()).status == 200
