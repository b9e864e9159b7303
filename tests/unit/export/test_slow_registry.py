"""Image registries that pack, dribble and lie about TLS: a pull ends, in words, and when it is told to."""

from __future__ import annotations

import gzip
import socket
import ssl
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest

from kybernate.export import registry_client
from kybernate.export.documents import LAYER, MOST_DOCUMENT, ArtefactInvalid, Descriptor
from kybernate.export.download import blob
from kybernate.export.reference import parsed
from kybernate.export.registry_client import Connection, ImageRegistryClient, Stopped
from kybernate.node.failure import Unavailable
from tests.unit.agent.access.authority import Authority

BLOB = Descriptor(LAYER, f"sha256:{'0' * 64}", 20 << 20)
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


class Raw:
    """A server that sends to each request the bytes that it is told to; `ended` is set when the test is over."""

    def __init__(self, answer: Callable[[Raw], Iterator[bytes]], context: ssl.SSLContext | None = None) -> None:
        self.ended, self.sending = threading.Event(), threading.Event()
        self._answer, self._context = answer, context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=self._one, args=(self._listener.accept()[0],), daemon=True).start()

    def _one(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            stream = self._context.wrap_socket(connection, server_side=True) if self._context else connection
            with stream:
                stream.recv(4096)
                for part in self._answer(self):
                    stream.sendall(part)
                    self.sending.set()

    def close(self) -> None:
        self.ended.set()
        self._listener.close()


@contextmanager
def client_of(answer: Callable[[Raw], Iterator[bytes]]) -> Iterator[tuple[Raw, ImageRegistryClient]]:
    server = Raw(answer)
    client = ImageRegistryClient(parsed(f"127.0.0.1:{server.port}/a/b:v1"), Connection())
    try:
        yield server, client
    finally:
        server.close()
        client.close()


def zstd(size: int) -> bytes:
    import zstandard

    return zstandard.compress(bytes(size))


@pytest.mark.parametrize(
    ("encoding", "content"),
    [
        ("gzip", lambda: gzip.compress(bytes(100 << 20))),
        ("gzip, gzip", lambda: gzip.compress(gzip.compress(bytes(100 << 20)))),
        ("zstd", lambda: zstd(100 << 20)),
        ("x-none", lambda: b"{}"),
    ],
)
def test_manifest_that_is_packed_is_refused_and_not_unpacked(encoding: str, content: Callable[[], bytes]) -> None:
    body = content()
    head = OK + f"Content-Length: {len(body)}\r\nContent-Encoding: {encoding}\r\n\r\n".encode()
    with client_of(lambda server: iter([head, body])) as (_, client):
        tracemalloc.start()
        try:
            with pytest.raises(ArtefactInvalid, match="gives a compressed manifest"):
                client.manifest("v1")
            assert tracemalloc.get_traced_memory()[1] < 20 << 20
        finally:
            tracemalloc.stop()


def test_manifest_without_an_end_is_cut() -> None:
    def endless(server: Raw) -> Iterator[bytes]:
        yield CHUNKED
        while not server.ended.is_set():
            yield b"10000\r\n" + bytes(1 << 16) + b"\r\n"

    with client_of(endless) as (_, client), pytest.raises(ArtefactInvalid, match=f"more than {MOST_DOCUMENT} bytes"):
        client.manifest("v1")


def dribbling(server: Raw) -> Iterator[bytes]:
    """Give a byte now and then, as long as the other side reads."""
    yield CHUNKED
    while not server.ended.wait(0.01):
        yield b"1\r\nx\r\n"


@pytest.mark.parametrize("read", [lambda client: client.manifest("v1"), lambda client: list(blob(client, BLOB))])
def test_registry_that_dribbles_is_given_up(
    read: Callable[[ImageRegistryClient], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_client, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(registry_client, "LEAST_RATE", 1 << 20)
    monkeypatch.setattr(registry_client, "FIRST_PAUSE", 0.0)
    with client_of(dribbling) as (_, client), pytest.raises(Unavailable, match=r"has given .* bytes in"):
        read(client)


def test_download_that_is_stopped_does_not_wait_for_its_next_megabyte() -> None:
    with client_of(dribbling) as (server, client), ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: list(blob(client, BLOB)))
        assert server.sending.wait(20)
        client.stop()
        with pytest.raises(Stopped):
            reading.result(20)


# ---- TLS


def names_of(name: str, lasts: timedelta) -> Callable[[Authority], tuple[bytes, bytes]]:
    return lambda ca: ca.issue(name, lasts=lasts)


DAY, YESTERDAY = timedelta(days=1), timedelta(days=-1)


@pytest.mark.parametrize(
    ("issued", "trusts_it", "version", "says"),
    [
        (names_of("localhost", DAY), False, "TLSv1_3", "certificate verify failed"),
        (names_of("other.example.org", DAY), True, "TLSv1_3", "Hostname mismatch"),
        (names_of("localhost", YESTERDAY), True, "TLSv1_3", "certificate has expired"),
        (names_of("localhost", DAY), True, "TLSv1_1", "SSL"),
        (None, True, "", "SSL"),
    ],
    ids=["another CA", "another name", "expired", "an old version", "no TLS"],
)
def test_errors_of_tls_are_said_in_words(
    tmp_path: Path,
    issued: Callable[[Authority], tuple[bytes, bytes]] | None,
    trusts_it: bool,
    version: str,
    says: str,
) -> None:
    ca, ca_file = Authority(), tmp_path / "ca"
    ca_file.write_bytes((ca if trusts_it else Authority()).certificate)
    server = Raw(
        lambda server: iter([OK + b"Content-Length: 2\r\n\r\n{}"]), issued and tls_of(tmp_path, issued(ca), version)
    )
    client = ImageRegistryClient(parsed(f"localhost:{server.port}/a/b:v1"), Connection(ca=ca_file))
    try:
        with pytest.raises(Unavailable, match=says) as error:
            client.manifest("v1")
        assert f"localhost:{server.port} cannot be reached" in str(error.value)
        assert "--ca names the certificate" in error.value.advice
    finally:
        client.close()
        server.close()


def tls_of(place: Path, issued: tuple[bytes, bytes], version: str) -> ssl.SSLContext:
    """Return a server's side with a key and a certificate."""
    (place / "both").write_bytes(b"".join(issued))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    context.maximum_version = ssl.TLSVersion[version]
    context.load_cert_chain(place / "both")
    return context
