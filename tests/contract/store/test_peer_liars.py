"""Another node's agent that lies about names, sizes, holes and lengths: nothing of it becomes an image."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from kybernate.client.contexts import Tls
from kybernate.client.target import Endpoint
from kybernate.messages.peer_pb2 import OpenedImage
from kybernate.store.errors import ImageDamaged
from kybernate.store.tiers import peer_reading
from kybernate.store.tiers.peer import PeerTier, _source
from kybernate.store.tiers.peer_connection import PartNotRead, PeerConnection, PeerFailed
from kybernate.store.tiers.peer_reading import Reading, parts_of
from kybernate.store.tiers.tier import Ref
from kybernate.store.transfer import Transfer
from kybernate_shim.checkpoint.image.manifest import NAME, File, Source, encode
from kybernate_shim.checkpoint.image.signature import sign
from kybernate_shim.config import Config
from kybernate_shim.trust.keys import signing_key
from tests.contract.store.test_peer import REF, two_nodes
from tests.fakes.images import PATTERN
from tests.fakes.sized_image import MIB
from tests.unit.agent.access.authority import Authority

TOKEN = "0" * 32
PART = 1000


# ---- what it says of an image


@pytest.fixture
def tier(tmp_path: Path) -> PeerTier:
    config = Config(checkpoint_root=tmp_path / "images", key_directory=tmp_path / "keys")
    return PeerTier("node-1", Endpoint("localhost:1"), config)


def described(tier: PeerTier, name: str = "web", wanted: Ref = REF, **changes: Any) -> Any:
    digest = f"blake3:{'0' * 64}"
    manifest = replace(PATTERN, **{"id": "image-1", "source": Source("c", namespace="team-a")} | changes)
    files = tuple(replace(file, digest=digest) for file in manifest.files)
    content = encode(sign(replace(manifest, files=files), signing_key(tier.config)))
    return _source(cast(Any, None), tier, wanted, OpenedImage(token=TOKEN, name=name, manifest=content))


def test_image_that_is_as_wanted_is_accepted(tier: PeerTier) -> None:
    assert described(tier).ref == REF
    assert described(tier, wanted=Ref("", "", "")).ref == REF


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "image-2"},
        {"source": Source("c", namespace="team-b")},
        {"files": (File("../passwd", 5, ""),)},
        {"files": (File("a/b", 5, ""),)},
        {"files": (File("/etc/passwd", 5, ""),)},
        {"files": (File(NAME, 5, ""),)},
        {"files": (File("a", 5, ""), File("a", 6, ""))},
        {"files": (File("a", -5, ""),)},
        {"files": (File("", 5, ""),)},
        {"files": (File(".kybernate-arrived", 5, ""),)},
    ],
    ids=str,
)
def test_other_image_or_odd_files_are_refused(tier: PeerTier, changes: dict[str, Any]) -> None:
    with pytest.raises(PeerFailed):
        described(tier, **changes)


@pytest.mark.parametrize("name", ["../../etc", "/etc/cron.d/x", "a/../../b", ".hidden", "", "a\0b", "x" * 300])
def test_odd_name_of_an_image_is_refused(tier: PeerTier, name: str) -> None:
    with pytest.raises(PeerFailed, match="is not the name of an image"):
        described(tier, name, Ref("", "", "image-1"))


# ---- what it answers


class Liar:
    """A TLS server that says to each request what it is told to, over and over until its client is gone."""

    def __init__(self, place: Path) -> None:
        ca = Authority()
        ca.write(place, "localhost")
        self.answer: Callable[[], Iterator[bytes]] = lambda: iter(())
        self._listener = socket.create_server(("127.0.0.1", 0))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(place / "certificate", place / "key")
        threading.Thread(target=self._serve, args=(context,), daemon=True).start()
        tls = Tls(place / "client_ca", place / "certificate", place / "key")
        self.target = Endpoint(f"localhost:{self._listener.getsockname()[1]}", tls)

    def _serve(self, context: ssl.SSLContext) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._lie, args=(context, connection), daemon=True).start()

    def _lie(self, context: ssl.SSLContext, connection: socket.socket) -> None:
        try:
            with context.wrap_socket(connection, server_side=True) as stream:
                while stream.recv(4096):
                    for part in self.answer():
                        stream.sendall(part)
        except OSError:
            pass

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def liar(tmp_path: Path) -> Iterator[Liar]:
    found = Liar(tmp_path)
    yield found
    found.close()


def head(*lines: str, status: str = "206 Partial Content") -> bytes:
    return "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {status}", *lines, "")).encode()


def endless(begin: bytes, part: bytes) -> Iterator[bytes]:
    yield begin
    while True:
        yield part


ONE_TOO_MANY = head(f"Content-Length: {PART + 1}") + bytes(PART + 1)
LIES: dict[str, tuple[Callable[[], Iterator[bytes]], type[Exception]]] = {
    "longer": (lambda: iter([ONE_TOO_MANY]), PeerFailed),
    "shorter": (lambda: iter([head(f"Content-Length: {PART - 1}") + bytes(PART - 1)]), PeerFailed),
    "no length, endless": (lambda: endless(head(), bytes(MIB)), PartNotRead),
    "chunked, endless": (lambda: endless(head("Transfer-Encoding: chunked"), b"3e8\r\n" + bytes(1000)), PartNotRead),
    "endless head": (lambda: endless(b"HTTP/1.1 206 OK\r\n", b"X: " + b"x" * 60_000 + b"\r\n"), PartNotRead),
    "endless line": (lambda: endless(b"", b"x" * 60_000), PartNotRead),
    "endless error": (lambda: endless(head(status="500 No"), b"x" * 60_000), PeerFailed),
    "all of the file": (lambda: iter([head(f"Content-Length: {PART}", status="200 OK") + bytes(PART)]), PeerFailed),
    "elsewhere": (lambda: iter([head("Location: https://localhost/", status="302 Found")]), PeerFailed),
    "negative": (lambda: iter([head("Content-Length: -1") + bytes(PART)]), PartNotRead),
}


@pytest.mark.parametrize("kind", LIES)
def test_answer_of_another_form_is_refused(liar: Liar, kind: str) -> None:
    liar.answer, error = LIES[kind]
    with pytest.raises(error):
        PeerConnection(liar.target).read(TOKEN, 0, 0, PART)


def test_certificate_for_another_name_or_of_another_ca_is_refused(liar: Liar, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(Authority("another").certificate)
    tls = cast(Tls, liar.target.tls)
    for target in (
        replace(liar.target, address=liar.target.address.replace("localhost", "127.0.0.1")),
        replace(liar.target, tls=replace(tls, ca=tmp_path / "other")),
    ):
        with pytest.raises(PeerFailed, match="certificate that is not valid"):
            PeerConnection(target).read(TOKEN, 0, 0, PART)


def test_more_than_was_announced_is_not_taken_for_the_next_answer(liar: Liar) -> None:
    liar.answer = lambda: iter(
        [head(f"Content-Length: {PART}") + bytes(PART) + head("Content-Length: 9") + b"malicious"]
    )
    connection = PeerConnection(liar.target)
    assert connection.read(TOKEN, 0, 0, PART) == bytes(PART)
    assert connection.read(TOKEN, 0, PART, PART) == bytes(PART)


class Image:
    """An open image of one file."""

    decoded = replace(PATTERN, files=(File("pages-1.img", PART, "blake3:0"),), arena=(), vram=())
    holes = ()
    token = TOKEN

    async def again(self, token: str) -> None:
        raise AssertionError("it has not closed")


@pytest.mark.parametrize("drip", [head(status="100 Continue"), b""], ids=["continue", "silence"])
def test_answer_that_never_comes_is_given_up(liar: Liar, drip: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_reading, "PART_SECONDS", 0.2)
    monkeypatch.setattr(peer_reading, "PATIENCE_SECONDS", 0.3)
    liar.answer = lambda: dripping(drip)

    async def scenario() -> None:
        reading = Reading(Image(), cast(Any, None), Transfer(), Nothing(), lambda: PeerConnection(liar.target))
        async with asyncio.timeout(30):
            await reading.run()

    with pytest.raises(PeerFailed):
        asyncio.run(scenario())


def dripping(part: bytes) -> Iterator[bytes]:
    while True:
        yield part
        time.sleep(0.01)


class Nothing:
    def has(self, file: str, offset: int, size: int) -> bool:
        return False


# ---- both together


def test_bytes_that_are_said_to_be_zeros_do_not_become_an_image(tmp_path: Path) -> None:
    with two_nodes(tmp_path) as (_, node):

        async def scenario() -> None:
            source = await node.peer.open_named("web")
            number = [file.name for file in source.decoded.files].index("pages-1.img")
            size = source.decoded.files[number].size
            source.holes = tuple(((0, size), (-5, 1 << 70)) if one == number else () for one in range(9))
            with pytest.raises(ImageDamaged, match=r"pages-1\.img"):
                await node.disk.receive(source, Transfer())
            await source.close()

        asyncio.run(scenario())
        assert not any(path.is_file() for path in (node.place / "images").rglob("*"))


def test_parts_are_all_bytes_of_all_files_whatever_the_holes() -> None:
    manifest = replace(PATTERN, files=(File("a", 9 * MIB + 5, ""), File("b", 0, ""), File("c", 7, "")))
    for holes in ((), (((4 * MIB, 4 * MIB),),), (((0, 1 << 70), (3, -9)), ((5, 5),), ((0, 7),))):
        parts = list(parts_of(manifest, holes))
        assert sum(one.size for one in parts) == 9 * MIB + 12
        assert len({(one.name, one.offset) for one in parts}) == len(parts) == 4
    assert [one.hole for one in parts_of(manifest, (((4 * MIB, 4 * MIB),),))] == [False, True, False, False]
