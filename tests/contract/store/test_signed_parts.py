"""Parts by signed URLs, from a service that answers them with status 200, and is not always well."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kybernate.store.keys import make_key
from kybernate.store.objects import Objects
from kybernate.store.parts import Part, PartBroken
from kybernate.store.place import StorePlace, open_store
from tests.contract.store.servers import BUCKET, OPTIONS

T = TypeVar("T")
MIB = 1 << 20
CONTENT = os.urandom(3 * MIB)
PATIENCE = 30.0  # shorter than the client waits for a silent service


class _Service(ThreadingHTTPServer):
    """One object under every name. The next answer is cut after `cut` bytes, before its head if that is negative.

    `silent`: its connection stays open.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.connections = 0
        self.closes = False  # after each answer, without a word
        self.cut: int | None = None
        self.silent = False
        self.silenced = threading.Event()
        self.end = threading.Event()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that ends a connection is no error here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Service

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def do_HEAD(self) -> None:
        self._answer(CONTENT, body=b"")

    def do_GET(self) -> None:
        start, end = 0, len(CONTENT)
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = int(first), min(end, int(last) + 1)
            self.extra = f"bytes {start}-{end - 1}/{len(CONTENT)}"
        cut, self.server.cut = self.server.cut, None
        content = CONTENT[start:end]
        if cut is None or cut >= 0:
            self._answer(content, body=content[:cut])
            self.wfile.flush()
        if cut is not None and self.server.silent:
            self.server.silenced.set()
            self.server.end.wait(60)
        self.close_connection = cut is not None or self.server.closes

    extra = ""

    def _answer(self, content: bytes, *, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        self.send_header("ETag", '"one"')
        if self.extra:
            self.send_header("Content-Range", self.extra)
        self.extra = ""
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 2 * PATIENCE))


@pytest.fixture
def service() -> Iterator[_Service]:
    with _Service() as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        try:
            yield found
        finally:
            found.end.set()
            found.shutdown()
            thread.join()


@pytest.fixture
def objects(service: _Service, tmp_path: Path) -> Objects:
    make_key(tmp_path / "key")
    endpoint = f"http://127.0.0.1:{service.server_port}"
    return open_store(StorePlace(f"s3://{BUCKET}/parts", tmp_path / "key", endpoint=endpoint, options=OPTIONS)).objects


async def signing(objects: Objects) -> None:
    """Let it find out that parts have to be asked for by signed URLs."""
    assert await objects.get_range("one", 0, 1) == CONTENT[:1]


def in_takes_of(size: int) -> Callable[[Part], list[bytes]]:
    def work(part: Part) -> list[bytes]:
        return list(iter(lambda: bytes(part.take(size)), b""))

    return work


def test_part_is_taken_in_pieces_over_one_connection(service: _Service, objects: Objects) -> None:
    async def scenario() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # each thread has its own connection
        await signing(objects)
        before = service.connections
        for start, length in [(0, MIB), (MIB + 3, 2 * MIB), (3 * MIB - 5, 100)]:
            found = await objects.read_range("one", start, length, in_takes_of(MIB // 2))
            assert all(len(one) == MIB // 2 for one in found[:-1])
            assert b"".join(found) == CONTENT[start : start + length]
        assert service.connections == before

    run(scenario())


def test_part_of_which_not_all_is_taken_does_not_spoil_the_next_one(objects: Objects) -> None:
    async def scenario() -> None:
        await signing(objects)
        assert await objects.read_range("one", 0, MIB, lambda part: bytes(part.take(10))) == CONTENT[:10]
        assert await objects.read_range("one", 20, 10, in_takes_of(10)) == [CONTENT[20:30]]

    run(scenario())


def test_connection_that_the_service_has_closed_is_opened_again(service: _Service, objects: Objects) -> None:
    async def scenario() -> None:
        service.closes = True
        await signing(objects)
        for start in range(5):
            assert await objects.read_range("one", start, 10, in_takes_of(10)) == [CONTENT[start : start + 10]]
        assert objects.ranged

    run(scenario())


def test_part_that_breaks_off_says_so_after_what_came(service: _Service, objects: Objects) -> None:
    async def scenario() -> None:
        await signing(objects)
        came: list[bytes] = []

        def work(part: Part) -> None:
            while True:
                came.append(bytes(part.take(MIB // 2)))

        service.cut = MIB + 17
        with pytest.raises(PartBroken, match=f"{MIB - 17} bytes did not arrive"):
            await objects.read_range("one", 0, 2 * MIB, work)
        assert b"".join(came) == CONTENT[:MIB]
        assert b"".join(await objects.read_range("one", MIB, MIB, in_takes_of(MIB))) == CONTENT[MIB : 2 * MIB]
        assert objects.ranged

    run(scenario())


def test_what_the_work_raises_is_not_taken_for_the_services_fault(objects: Objects) -> None:
    """It would be done a second time, although a part of it has been done."""

    async def scenario() -> None:
        await signing(objects)
        calls: list[int] = []

        def full(part: Part) -> None:
            calls.append(len(part.take(10)))
            raise OSError(28, "No space left on device")

        with pytest.raises(OSError, match="No space left on device"):
            await objects.read_range("one", 0, MIB, full)
        assert calls == [10]

    run(scenario())


@pytest.mark.parametrize("cut", [-1, 10])
def test_cancelled_read_ends_although_the_service_is_silent(service: _Service, objects: Objects, cut: int) -> None:
    async def scenario() -> None:
        await signing(objects)
        service.cut, service.silent = cut, True
        ended: list[str] = []

        def work(part: Part) -> None:
            try:
                part.take(MIB)
            finally:
                ended.append("work")

        task = asyncio.ensure_future(objects.read_range("one", 0, MIB, work))
        while not await asyncio.to_thread(service.silenced.wait, 0.1):
            assert not task.done()
        task.cancel()
        await asyncio.wait({task}, timeout=PATIENCE)
        assert task.cancelled()
        assert ended == (["work"] if cut > 0 else [])

    run(scenario())
