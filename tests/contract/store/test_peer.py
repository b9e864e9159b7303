"""An image of another node's agent: whole or not at all, to those who may have it, and also when the agent dies."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kybernate.node.deleting import delete
from kybernate.node.failure import Failure, NoImage, Refused
from kybernate.store.errors import ImageDamaged
from kybernate.store.movement.moving import ImageNowhere, bring
from kybernate.store.tiers import peer_reading
from kybernate.store.tiers.directory import DirectoryTier
from kybernate.store.tiers.peer import PeerTier
from kybernate.store.tiers.peer_connection import ImageClosed, PartNotRead, PeerFailed
from kybernate.store.tiers.tier import Held, Ref
from kybernate.store.transfer import Transfer
from kybernate_shim.checkpoint.image.digests import Digester
from kybernate_shim.checkpoint.image.manifest import NAME, Signature, decode, encode
from kybernate_shim.checkpoint.image.verification import verify
from kybernate_shim.linux.locks import held, try_lock_directory
from kybernate_shim.linux.private_files import write_private
from tests.contract.store.peers import Node, Server, nodes, signed_again, signed_image
from tests.fakes.sized_image import MIB, contents
from tests.unit.agent.access.authority import Authority

T = TypeVar("T")
REF = Ref("team-a", "web", "image-1")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 100))


@contextmanager
def two_nodes(place: Path) -> Iterator[tuple[Server, Node]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server, node = nodes(place, port)
    signed_image(node, server.images / "team-a/web")
    server.start()
    try:
        yield server, node
    finally:
        server.kill()


@pytest.fixture
def both(tmp_path: Path) -> Iterator[tuple[Server, Node]]:
    """Both nodes, for tests that change the first one, too."""
    with two_nodes(tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Node]]:
    with two_nodes(tmp_path_factory.mktemp("peer")) as found:
        yield found


@pytest.fixture
def shared(served: tuple[Server, Node]) -> tuple[Server, Node]:
    """Both nodes; the second one has no image yet. For tests that leave the first one as it is."""
    server, node = served
    shutil.rmtree(node.place / "images", ignore_errors=True)
    node.certify()
    return server, node


async def brought(node: Node, transfer: Transfer | None = None, ref: Ref = REF) -> Transfer:
    transfer = transfer or Transfer()
    source = await node.peer.open(ref)
    try:
        await node.disk.receive(source, transfer)
    finally:
        await source.close()
    return transfer


def image_of(server: Server) -> Path:
    return server.images / "team-a/web"


def nothing_has_come(node: Node) -> bool:
    """Return whether there is no image, nor bytes of one that no later attempt uses."""
    return not any(path.is_file() for path in (node.place / "images").rglob("*"))


def same(node: Node, server: Server) -> bool:
    left, right = contents(node.place / "images/team-a/web"), contents(image_of(server))
    right.pop("kybernate-registry.json", None)
    return left == right


def test_image_moves(shared: tuple[Server, Node]) -> None:
    server, node = shared

    async def scenario() -> Transfer:
        assert [one.ref async for one in node.peer.images()] == [REF]
        assert (await node.peer.find(REF)).bytes > 9 * MIB
        return await brought(node)

    progress = run(scenario()).progress
    assert same(node, server)
    assert not verify(node.place / "images/team-a/web")
    assert progress.done_bytes == progress.total_bytes == progress.sent_bytes + progress.zero_bytes
    assert progress.zero_bytes >= 4 * MIB, "a hole is not sent"
    lines = [json.loads(line) for line in (server.place / "audit.log").read_text().splitlines()]
    assert (lines[-1]["verb"], lines[-1]["decision"], lines[-1]["caller"]["name"]) == ("send", "allowed", "node-2")
    assert lines[-1]["image"]["path"] == "image-1"


def test_what_is_not_there_is_named(shared: tuple[Server, Node]) -> None:
    _, node = shared

    async def scenario() -> None:
        with pytest.raises(NoImage, match="none"):
            await node.peer.open(Ref("team-a", "none", ""))
        with pytest.raises(Failure, match="are removed by its own agent"):
            await node.peer.remove(REF)
        source = await node.peer.open(REF)
        with pytest.raises(Failure, match="are written by its own agent"):
            await node.peer.receive(source, Transfer())
        await source.close()

    run(scenario())


@pytest.mark.parametrize(
    ("ca", "name", "error"),
    [
        (None, "reader-1", "may not call OpenImage"),
        (None, "stranger", "may not call OpenImage"),
        (Authority("another"), "node-2", "no agent answers"),
    ],
    ids=["reader", "stranger", "other CA"],
)
def test_only_peers_get_images(shared: tuple[Server, Node], ca: Authority | None, name: str, error: str) -> None:
    _, node = shared
    node.certify(ca, name)
    with pytest.raises(Failure, match=error):
        run(brought(node))
    assert nothing_has_come(node)


def test_bytes_are_for_the_peer_that_has_opened_the_image(shared: tuple[Server, Node]) -> None:
    _, node = shared

    async def scenario() -> None:
        source = await node.peer.open(REF)
        assert await asyncio.to_thread(node.connection().read, source.token, 0, 0, 10)
        for name in ("node-3", "operator-1"):
            node.certify(name=name)
            with pytest.raises(ImageClosed):
                await asyncio.to_thread(node.connection().read, source.token, 0, 0, 10)
        node.certify(name="reader-1")
        with pytest.raises(PeerFailed, match=r"403.*reader-1"):
            await asyncio.to_thread(node.connection().read, source.token, 0, 0, 10)
        node.certify(Authority("another"))
        with pytest.raises(PartNotRead):
            await asyncio.to_thread(node.connection().read, source.token, 0, 0, 10)
        node.certify()
        await source.close()
        with pytest.raises(ImageClosed):
            await asyncio.to_thread(node.connection().read, source.token, 0, 0, 10)

    run(scenario())


def test_without_a_certificate_nothing_is_said(shared: tuple[Server, Node]) -> None:
    server, node = shared
    context = ssl.create_default_context(cafile=node.place / "client_ca")
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # the certificates of tests are small
    context.set_alpn_protocols(["http/1.1"])
    connection = http.client.HTTPSConnection("localhost", server.port, context=context, timeout=10)
    connection.connect()

    def ask() -> http.client.HTTPResponse:
        connection.request("GET", "/images/" + "0" * 32 + "/0")
        return connection.getresponse()

    with pytest.raises((ssl.SSLError, ConnectionError)):  # the alert, or the closed connection where that is seen first
        ask()


def test_requests_reach_nothing_but_ranges_of_the_images_files(shared: tuple[Server, Node]) -> None:
    server, node = shared
    core = (image_of(server) / "core-1.img").read_bytes()

    async def scenario() -> None:
        source = await node.peer.open(REF)
        own = f"/images/{source.token}"
        for method, path, range, status in (
            ("GET", f"{own}/0", "bytes=0-4999", 206),
            ("GET", f"{own}/0", "bytes=0-5000", 416),
            ("GET", f"{own}/0", "bytes=9-3", 416),
            ("GET", f"{own}/0", f"bytes=0-{10**18 - 1}", 416),
            ("GET", f"{own}/0", "bytes=-5", 400),
            ("GET", f"{own}/0", "bytes=0-1,3-4", 400),
            ("GET", f"{own}/0", "", 400),
            ("PUT", f"{own}/0", "bytes=0-9", 405),
            ("HEAD", f"{own}/0", "bytes=0-9", 405),
            ("GET", f"{own}/99", "bytes=0-9", 404),
            ("GET", f"{own}/../key", "bytes=0-9", 404),
            ("GET", f"{own}/%2e%2e%2fkey", "bytes=0-9", 404),
            ("GET", "/etc/passwd", "bytes=0-9", 404),
            ("GET", f"/images/{'0' * 32}/0", "bytes=0-9", 410),
        ):
            found = await asyncio.to_thread(node.asked, method, path, range)
            assert found[0] == status, (method, path, range, found)
            assert status != 206 or found[1] == core
        await source.close()

    run(scenario())


def test_file_that_was_replaced_by_a_link_is_not_sent(both: tuple[Server, Node]) -> None:
    server, node = both

    async def scenario() -> None:
        source = await node.peer.open(REF)
        secret = server.place / "secret"
        secret.write_bytes(bytes(5000))
        (image_of(server) / "core-1.img").unlink()
        (image_of(server) / "core-1.img").symlink_to(secret)
        with pytest.raises(PeerFailed, match=r"409.*not a regular file"):
            await node.disk.receive(source, Transfer())
        await source.close()

    run(scenario())


def test_image_that_is_open_is_not_removed(shared: tuple[Server, Node]) -> None:
    server, node = shared

    async def scenario() -> None:
        source = await node.peer.open(REF)
        with pytest.raises(Refused, match="is in use"):
            await asyncio.to_thread(delete, image_of(server), "test")
        await source.close()
        with held(try_lock_directory(image_of(server))) as unused:
            assert unused

    run(scenario())


def test_image_comes_from_the_node_that_has_it(shared: tuple[Server, Node], tmp_path: Path) -> None:
    _, node = shared
    away = PeerTier("node-3", replace(node.peer.target, address="localhost:1"), node.config)
    found, source = run(bring(REF, [DirectoryTier("ram", 1, tmp_path), away, node.peer], node.disk, Transfer()))
    assert (found.ref, source) == (REF, "peer node-1")
    with pytest.raises(ImageNowhere, match="no agent answers"):
        run(bring(REF, [away], DirectoryTier("disk", 2, tmp_path), Transfer()))


def test_flipped_bit_is_found_before_the_image_appears(both: tuple[Server, Node]) -> None:
    server, node = both
    with (image_of(server) / "pages-1.img").open("r+b") as stream:
        stream.seek(3 * MIB)
        byte = stream.read(1)[0]
        stream.seek(3 * MIB)
        stream.write(bytes([byte ^ 1]))
    with pytest.raises(ImageDamaged, match=r"pages-1\.img: changed"):
        run(brought(node))
    assert nothing_has_come(node)


def test_image_that_this_node_does_not_trust_is_not_read(both: tuple[Server, Node]) -> None:
    server, node = both
    manifest = decode((image_of(server) / NAME).read_bytes())
    for changed in (replace(manifest, signature=Signature()), replace(manifest, terminal=True)):
        write_private(image_of(server) / NAME, encode(changed))
        with pytest.raises(PeerFailed, match=r"not signed|does not match"):
            run(brought(node))
    with Digester("xxh128") as digester:
        files = digester.files(image_of(server), [file.name for file in manifest.files])
    signed_again(node, image_of(server), replace(manifest, files=files))
    with pytest.raises(PeerFailed, match="detect damage but not forgery"):
        run(brought(node))
    assert nothing_has_come(node)


class Killing(Transfer):
    """Has something done in the middle of a transfer."""

    def __init__(self, after: int, work: Callable[[], object], **limits: Any) -> None:
        super().__init__(**limits)
        self._left, self._work = after, work

    async def pace(self, count: int) -> None:
        self._left -= 1
        if self._left == 0:
            await asyncio.to_thread(self._work)
        await super().pace(count)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_reading, "PART", 1 << 18)


@pytest.mark.usefixtures("small_parts")
def test_transfer_continues_when_the_agent_was_killed_and_is_back(both: tuple[Server, Node]) -> None:
    server, node = both

    def die() -> None:
        server.kill()
        threading.Timer(0.5, server.start).start()

    progress = run(brought(node, Killing(10, die))).progress
    assert same(node, server)
    assert progress.sent_bytes + progress.zero_bytes == progress.total_bytes, "nothing was read twice"


@pytest.mark.usefixtures("small_parts")
def test_agent_that_stays_away_is_given_up_and_what_came_is_used(
    both: tuple[Server, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, node = both
    monkeypatch.setattr(peer_reading, "PATIENCE_SECONDS", 0.5)
    with pytest.raises(PeerFailed):
        run(brought(node, Killing(10, server.kill)))
    assert run(_all(node)) == []
    server.start()
    progress = run(brought(node)).progress
    assert same(node, server)
    assert progress.known_bytes >= 5 << 18


@pytest.mark.usefixtures("small_parts")
def test_cancelled_transfer_ends_immediately_and_can_be_continued(shared: tuple[Server, Node]) -> None:
    server, node = shared
    reached = threading.Event()

    async def scenario() -> None:
        slow = Killing(8, reached.set, bytes_per_second=20 * MIB)
        task = asyncio.create_task(brought(node, slow))
        await asyncio.to_thread(reached.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not [one for one in threading.enumerate() if "peer" in one.name]
        assert (await brought(node)).progress.known_bytes >= 1 << 18

    run(scenario())
    assert same(node, server)


async def _all(node: Node) -> list[Held]:
    return [one async for one in node.disk.images()]
