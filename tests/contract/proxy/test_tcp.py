"""Ports without HTTP, which this process serves whatever the plane of HTTP is; both are tried."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kybernate.proxy.embedded.tcp import MAGIC
from kybernate.proxy.haproxy.child import find_binary
from kybernate.proxy.holding import Phase
from tests.contract.proxy.conftest import Standing
from tests.contract.proxy.stand import free_port


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


async def test_first_connection_wakes_and_held_bytes_go_on(standing_proxy: Standing) -> None:
    async with echoing() as (echo, port), standing_proxy(route(port)) as stand:
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


async def test_open_connection_is_activity(standing_proxy: Standing) -> None:
    async with echoing() as (_, port), standing_proxy(route(port, model=", idle: 30ms")) as stand:
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.service.tcp_ports[0])
        writer.write(b"one")
        assert await reader.readexactly(8) == b"echo one"
        await asyncio.sleep(0.15)  # five times what an idle model has, as nothing must happen
        assert stand.models.calls["suspend db"] == 0
        writer.close()
        await stand.until(lambda: stand.models.calls["suspend db"] == 1)


async def test_probe_that_only_connects_wakes_nothing(standing_proxy: Standing) -> None:
    async with echoing() as (_, port), standing_proxy(route(port, ", wake_on: data")) as stand:
        _, writer = await asyncio.open_connection("127.0.0.1", stand.service.tcp_ports[0])
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.service.tcp_ports[0])
        assert not stand.models.calls
        writer.write(b"x")
        assert await reader.readexactly(6) == b"echo x"
        assert stand.models.calls["wake db"] == 1
        writer.close()


async def test_client_that_hangs_up_leaves_the_queue(standing_proxy: Standing) -> None:
    async with echoing() as (_, port), standing_proxy(route(port)) as stand:
        stand.models.may_wake.clear()
        _, writer = await asyncio.open_connection("127.0.0.1", stand.service.tcp_ports[0])
        await stand.until(lambda: stand.held("db").waiting)
        writer.close()
        await stand.until(lambda: not stand.held("db").waiting)


async def test_upstream_learns_the_client_by_the_proxy_protocol(standing_proxy: Standing) -> None:
    async with echoing() as (echo, port), standing_proxy(route(port, ", proxy_protocol: true")) as stand:
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.service.tcp_ports[0])
        own = writer.get_extra_info("sockname")[1]
        writer.write(b"x")
        await reader.readexactly(6)
        header = await stand.until(lambda: next((bytes(one) for one in echo.got if one.endswith(b"x")), b""))
        assert header.startswith(MAGIC + b"\x21\x11\x00\x0c" + b"\x7f\x00\x00\x01" * 2 + own.to_bytes(2, "big"))
        writer.close()


async def test_wake_that_fails_closes_the_connection(standing_proxy: Standing) -> None:
    async with echoing() as (_, port), standing_proxy(route(port)) as stand:
        stand.models.failure = "broken"
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.service.tcp_ports[0])
        assert await reader.read() == b""
        writer.close()


async def test_http_of_the_same_proxy_is_untouched(standing_proxy: Standing) -> None:
    async with echoing() as (_, port), standing_proxy(route(port), phase=Phase.AWAKE) as stand:
        assert (await stand.chat()).status == 200


async def test_server_that_speaks_first_is_heard(standing_proxy: Standing) -> None:
    """As those of SSH and mail do: the client sends nothing until it has the greeting."""

    async def greets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-kybernate\r\n")
        writer.write(b"you said " + await reader.readline())
        writer.close()

    server = await asyncio.start_server(greets, "127.0.0.1", 0)
    async with server, standing_proxy(route(server.sockets[0].getsockname()[1])) as stand:
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.service.tcp_ports[0])
        assert await reader.readline() == b"SSH-2.0-kybernate\r\n"
        writer.write(b"hello\n")
        assert await reader.read() == b"you said hello\n"
        writer.close()


async def test_haproxy_takes_the_header_of_the_proxy_protocol(standing_proxy: Standing, tmp_path: Path) -> None:
    """It sees the client's address, and that of the port which the client called, in place of the proxy's own."""
    port, config = free_port(), tmp_path / "accept.cfg"
    config.write_text(
        "defaults\n  mode http\n  timeout client 20s\n  timeout connect 5s\n  timeout server 20s\n"
        f"frontend one\n  bind 127.0.0.1:{port} accept-proxy\n"
        '  http-request return status 200 content-type text/plain lf-string "%[src]:%[src_port] %[dst]:%[dst_port]"\n'
    )
    taker = await asyncio.create_subprocess_exec(find_binary(), "-db", "-f", str(config))
    try:
        async with standing_proxy(route(port, ", proxy_protocol: true")) as stand:
            reader, writer = await asyncio.open_connection("127.0.0.1", stand.service.tcp_ports[0])
            own = writer.get_extra_info("sockname")[1]
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            answer = await reader.read()
            assert answer.endswith(f"127.0.0.1:{own} 127.0.0.1:{stand.service.tcp_ports[0]}".encode()), answer
            writer.close()
    finally:
        taker.kill()
        await taker.wait()


async def test_connections_of_one_client_are_bounded(standing_proxy: Standing) -> None:
    async with echoing() as (_, port), standing_proxy(route(port) + "\nlimits: {per_client: 2}") as stand:
        kept = [await asyncio.open_connection("127.0.0.1", stand.service.tcp_ports[0]) for _ in range(2)]
        for reader, writer in kept:
            writer.write(b"x")
            assert await reader.readexactly(6) == b"echo x"
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.service.tcp_ports[0])
        assert await reader.read() == b""
        for _, open_one in [*kept, (reader, writer)]:
            open_one.close()
        await stand.until(lambda: not stand.held("db").in_flight)
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.service.tcp_ports[0])
        writer.write(b"y")
        assert await reader.readexactly(6) == b"echo y"
        writer.close()


async def test_client_that_is_silent_is_cut_off_where_data_wakes(standing_proxy: Standing) -> None:
    settings = "\nlimits: {idle_seconds: 100ms}"
    async with echoing() as (_, port), standing_proxy(route(port, ", wake_on: data") + settings) as stand:
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.service.tcp_ports[0])
        assert await reader.read() == b""  # ends only because the proxy closes
        assert not stand.models.calls
        writer.close()
