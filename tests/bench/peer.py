"""An image of 1 GiB from another agent, and the same bytes by one plain TLS connection between two Python programs.

Both sides read and write memory, and both present certificates. The agent's side also asks, describes and paces.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import socket
import ssl
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from kybernate.store.sink import DirectorySink
from kybernate.store.tiers.tier import Ref
from kybernate.store.transfer import Transfer
from tests.bench.figures import Pair
from tests.contract.store.peers import Node, Server, nodes, signed_image

NAMES = ("peer.read",)
MIB = 1024
BLOCK = 1 << 20
BAR = 1 / 0.85
REF = Ref("team-a", "web", "image-1")


class Nothing:
    def has(self, file: str, offset: int, size: int) -> bool:
        return False


def pairs() -> Iterator[Pair]:
    """Yield the comparison, with a server for each side."""
    with ExitStack() as stack:
        place = Path(tempfile.mkdtemp(prefix="peer", dir="/dev/shm"))
        stack.callback(shutil.rmtree, place)
        server, node = nodes(place, _free_port())
        signed_image(node, server.images / REF.path, mib=MIB)
        server.start()
        stack.callback(server.kill)
        listener = socket.create_server(("127.0.0.1", 0))
        plain = multiprocessing.get_context("fork").Process(target=_serve, args=(listener, server), daemon=True)
        plain.start()
        stack.callback(plain.kill)
        port = listener.getsockname()[1]
        yield Pair("peer.read", lambda: asyncio.run(_read(node)), lambda: _copied(node, port), bar=BAR)


async def _read(node: Node) -> float:
    source = await node.peer.open_named(REF.id)
    target = node.place / "read"
    target.mkdir()
    sink = DirectorySink(target, {file.name: file.size for file in source.decoded.stored_files})
    begin = time.monotonic()
    await source.pour(sink, Transfer(), Nothing())
    took = time.monotonic() - begin
    sink.close()
    await source.close()
    shutil.rmtree(target)
    return took


def _copied(node: Node, port: int) -> float:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # as our side's: the default one of Python 3.13 is stricter
    context.load_verify_locations(node.place / "client_ca")
    context.load_cert_chain(node.place / "certificate", node.place / "key")
    buffer = memoryview(bytearray(BLOCK))
    begin = time.monotonic()
    with (
        socket.create_connection(("localhost", port)) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as stream,
        (node.place / "copy").open("wb", buffering=0) as target,
    ):
        while count := stream.recv_into(buffer):
            target.write(buffer[:count])
    took = time.monotonic() - begin
    assert (node.place / "copy").stat().st_size > MIB * BLOCK
    (node.place / "copy").unlink()
    return took


def _serve(listener: socket.socket, server: Server) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.place / "certificate", server.place / "key")
    context.load_verify_locations(server.place / "client_ca")
    context.verify_mode = ssl.CERT_REQUIRED
    while True:
        connection, _ = listener.accept()
        with context.wrap_socket(connection, server_side=True) as stream:
            source = os.open(server.images / REF.path / "pages-1.img", os.O_RDONLY)
            while block := os.read(source, BLOCK):
                stream.sendall(block)
            os.close(source)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
