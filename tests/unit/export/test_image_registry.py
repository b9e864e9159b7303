"""Push and pull against an image registry that fails, lies, or knows less of the protocol."""

from __future__ import annotations

import base64
import gzip
import json
import os
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kybernate.export import guard, registry_client
from kybernate.export import push as pushing
from kybernate.export.credentials import Credentials
from kybernate.export.documents import ArtefactInvalid
from kybernate.export.guard import Guard
from kybernate.export.layer_record import NAME as LAYERS
from kybernate.export.layers import Compression
from kybernate.export.pull import fetching
from kybernate.export.push import Pushed
from kybernate.export.reference import Reference, parsed
from kybernate.export.registry_client import ATTEMPTS, Connection, ImageRegistryClient
from kybernate.export.sources import ImageRegistrySource
from kybernate.node.failure import Failure, Unavailable
from kybernate_shim.checkpoint.image.manifest import NAME
from kybernate_shim.checkpoint.image.store import Image
from kybernate_shim.config import Config
from tests.fakes.image_registry import Answer, Broken, FakeRegistry, registry
from tests.unit.export.conftest import content

NO_PARALLEL, PARALLEL = Connection(parallel=1), Connection()


@pytest.fixture
def server() -> Iterator[FakeRegistry]:
    with registry() as it:
        yield it


def at(server: FakeRegistry, repository: str = "a/b", tag: str = "v1") -> Reference:
    return parsed(f"{server.host}/{repository}:{tag}")


def push(server: FakeRegistry, image: Image, how: Connection = NO_PARALLEL, **where: str) -> Pushed:
    return pushing.push(image, at(server, **where), how, compression=Compression.NONE)


def pull(
    server: FakeRegistry, config: Config, reference: Reference | None = None, how: Connection = PARALLEL
) -> dict[str, bytes]:
    """Return the files that a pull gives; nothing is left of them on the disk."""
    client = ImageRegistryClient(reference or at(server), how)
    try:
        with fetching(config) as directory:
            return content(directory.fill(ImageRegistrySource(client)).image.path)
    finally:
        client.close()


def once(number: int, then: Callable[[], int | None]) -> Callable[[int], int | None]:
    """Return a fault of the request `number` alone."""
    return lambda now: then() if now == number else None


def broken() -> None:
    raise Broken


@pytest.mark.parametrize("compression", Compression)
@pytest.mark.parametrize("parallel", [1, 5])
def test_image_comes_back_as_it_was(
    server: FakeRegistry, image: Image, config: Config, compression: Compression, parallel: int
) -> None:
    how = Connection(parallel=parallel)
    done = pushing.push(image, at(server), how, compression=compression)
    assert pull(server, config, done.reference, how) == content(image.path)
    assert {path.name for path in config.checkpoint_root.iterdir()} == {"shop"}
    assert server.uploads == {}


def test_pull_that_was_killed_continues_after_whole_layers(server: FakeRegistry, image: Image, config: Config) -> None:
    """Also where a layer was killed in the middle, and what it had written by then is there."""
    done = push(server, image)
    text = str(done.reference)
    assert pull(server, config, done.reference, NO_PARALLEL) == content(image.path)
    all_of_it = server.requests["GET blobs"]
    server.requests.clear()
    server.faults["GET blobs"] = lambda number: broken() if number >= all_of_it else None
    client = ImageRegistryClient(done.reference, NO_PARALLEL)
    with pytest.raises(Unavailable), fetching(config, text) as directory:
        directory.fill(ImageRegistrySource(client))
    client.close()
    (left,) = config.checkpoint_root.glob(".import-*")
    assert [json.loads(line)["layer"] for line in (left / LAYERS).read_text().splitlines()[1:]]
    (left / "half-1.img").write_bytes(b"half")
    del server.faults["GET blobs"]
    server.requests.clear()
    client = ImageRegistryClient(done.reference, NO_PARALLEL)
    with fetching(config, text) as directory:
        assert content(directory.fill(ImageRegistrySource(client)).image.path) == content(image.path)
    client.close()
    assert not list(config.checkpoint_root.glob(".import-*"))
    assert server.requests["GET blobs"] < all_of_it


def test_one_pull_of_a_reference_at_a_time(config: Config) -> None:
    with (
        fetching(config, "a/b:v1"),
        pytest.raises(Failure, match="another command pulls a/b:v1"),
        fetching(config, "a/b:v1"),
    ):
        pass


@pytest.mark.parametrize("compression", Compression)
def test_same_image_is_the_same_bytes_and_is_sent_once(
    server: FakeRegistry, image: Image, compression: Compression
) -> None:
    first, second = (pushing.push(image, at(server), NO_PARALLEL, compression=compression) for _ in range(2))
    assert first.reference == second.reference
    assert (second.sent_bytes, second.known_bytes) == (0, first.sent_bytes)


def test_equal_layers_are_mounted_from_another_repository(server: FakeRegistry, image: Image, config: Config) -> None:
    push(server, image)
    done = push(server, image, Connection(mount_from="a/b"), repository="c")
    assert done.sent_bytes == 0
    assert pull(server, config, done.reference) == content(image.path)


def test_ranges_are_read_in_parallel_and_without_them_all_is_read(image: Image, config: Config) -> None:
    with registry() as ranged, registry(ranges=False, takes_parts=False) as simple:
        for server in (ranged, simple):
            push(server, image)
            assert pull(server, config) == content(image.path)
        assert ranged.requests["GET blobs"] > 6
        assert ranged.requests["PATCH uploads"] > 4
        assert simple.requests["GET blobs"] < 10


@pytest.mark.parametrize("what", ["PATCH uploads", "PUT uploads", "POST uploads", "HEAD blobs", "PUT manifests"])
@pytest.mark.parametrize("fault", [broken, lambda: 503])
def test_interrupted_upload_continues(
    server: FakeRegistry, image: Image, config: Config, what: str, fault: Callable[[], int | None]
) -> None:
    server.faults[what] = once(1, fault)
    push(server, image)
    assert pull(server, config) == content(image.path)


def test_part_whose_answer_is_lost_is_not_sent_twice(
    server: FakeRegistry, image: Image, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = [True]
    original = ImageRegistryClient.once

    def once_lost(self: ImageRegistryClient, method: str, *rest: Any) -> httpx.Response:
        answer = original(self, method, *rest)
        if method == "PATCH" and lost:
            lost.clear()
            raise httpx.ReadError("the answer is lost")
        return answer

    monkeypatch.setattr(ImageRegistryClient, "once", once_lost)
    push(server, image)
    assert pull(server, config) == content(image.path)


@pytest.mark.parametrize("fault", [broken, lambda: 500])
def test_interrupted_download_continues(
    server: FakeRegistry, image: Image, config: Config, fault: Callable[[], int | None]
) -> None:
    push(server, image)
    server.faults["GET blobs"] = lambda number: fault() if number % 2 == 0 else None
    assert pull(server, config) == content(image.path)


def test_registry_that_stays_away_leaves_nothing(server: FakeRegistry, image: Image, config: Config) -> None:
    push(server, image)
    server.faults["GET blobs"] = lambda number: broken()
    with pytest.raises(Unavailable, match="cannot be reached"):
        pull(server, config, how=NO_PARALLEL)
    assert server.requests["GET blobs"] >= ATTEMPTS
    assert {path.name for path in config.checkpoint_root.iterdir()} == {"shop"}


@pytest.mark.parametrize("what", ["PATCH uploads", "PUT uploads", "PUT manifests"])
def test_failed_push_leaves_the_tag_as_it_was(server: FakeRegistry, image: Image, what: str) -> None:
    server.manifests["a/b", "v1"] = b"old"
    server.faults[what] = lambda number: 403
    with pytest.raises(Failure, match="cannot be pushed: HTTP 403"):
        push(server, image)
    assert server.manifests["a/b", "v1"] == b"old"
    assert server.uploads == {}


def test_image_that_changes_while_it_is_pushed_is_refused(server: FakeRegistry, image: Image) -> None:
    path = image.path / "pages-1.img"
    path.write_bytes(b"x" + path.read_bytes()[1:])
    with pytest.raises(Failure, match="is not as the manifest lists it"):
        push(server, image)
    assert server.manifests == {}


def test_token_is_asked_for_with_credentials(image: Image, config: Config) -> None:
    with registry(user="me") as server:
        how = Connection(Credentials("me", "me"))
        push(server, image, how)
        assert pull(server, config, how=how) == content(image.path)
        with pytest.raises(Failure, match="gives no token: HTTP 401"):
            pull(server, config, how=Connection(Credentials("me", "other")))
        with pytest.raises(Failure, match="gives no token"):
            pull(server, config)


def test_credentials_go_to_no_other_host(image: Image) -> None:
    with registry(takes_parts=False) as other, registry(user="me", upload_host=other.host) as server:
        push(server, image, Connection(Credentials("me", "me")))
        assert other.blobs
        assert "Bearer valid" in server.authorizations
        assert other.authorizations == {None}


def refused(server: FakeRegistry, config: Config, answer: Answer) -> str:
    """Return why nothing is pulled from a registry that answers so."""
    server.faults["GET manifests"] = lambda number: answer
    with pytest.raises(Failure, match=r"names|HTTP|token|address") as error:
        pull(server, config)
    return str(error.value)


def test_error_that_unpacks_to_gigabytes_is_not_unpacked(server: FakeRegistry, config: Config) -> None:
    bomb = gzip.compress(bytes(200 << 20))
    tracemalloc.start()
    try:
        words = refused(server, config, (403, bomb, {"Content-Encoding": "gzip"}))
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()
    assert "HTTP 403" in words


def test_error_without_end_is_cut(server: FakeRegistry, config: Config) -> None:
    assert "HTTP 403" in refused(server, config, (403, bytes(64 << 20), {}))


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("/v2/a/b/manifests/v1", "gives nothing that can be used"),  # to itself, again and again
        ("http://[::1", "cannot be reached"),
        ("gopher://127.0.0.1/x", "by another protocol"),
        ("http://169.254.169.254/latest/meta-data", "a link-local address"),
    ],
)
def test_redirect_that_leads_nowhere_good_is_refused_in_words(
    server: FakeRegistry, config: Config, monkeypatch: pytest.MonkeyPatch, place: str, why: str
) -> None:
    monkeypatch.setattr(registry_client, "FIRST_PAUSE", 0.0)
    server.faults["GET manifests"] = lambda number: (307, b"", {"Location": place})
    with pytest.raises(Failure, match=why):
        pull(server, config)


ADDRESSES = {"registry": "192.0.2.7", "inside": "127.0.0.2", "clouds": "169.254.169.254", "mapped": "::ffff:127.0.0.1"}


@pytest.mark.parametrize(
    ("origin", "place", "passes"),
    [
        ("https://registry", "https://192.0.2.8/blob", True),
        ("https://registry", "http://192.0.2.8/blob", False),
        ("http://registry", "https://192.0.2.8/blob", True),
        ("http://registry", "http://192.0.2.8/blob", True),
        ("http://registry", "http://inside/blob", False),
        ("http://registry", "http://mapped/blob", False),
        ("https://registry", "https://clouds/blob", False),
        ("http://registry", "http://0.0.0.0/blob", False),
        ("http://inside", "http://127.0.0.1:5000/blob", True),
        ("http://inside", "http://169.254.1.1/blob", False),
        ("http://registry", "http://name-that-is-none/blob", True),  # it fails by itself
    ],
)
def test_registry_leads_to_no_address_of_the_nodes_own(
    monkeypatch: pytest.MonkeyPatch, origin: str, place: str, passes: bool
) -> None:
    def resolved(host: str, port: object) -> list[Any]:
        if host == "name-that-is-none":
            raise socket.gaierror
        return [(0, 0, 0, "", (ADDRESSES.get(host, host), 0))]

    monkeypatch.setattr(guard.socket, "getaddrinfo", resolved)
    request = httpx.Request("GET", place)
    if passes:
        Guard(httpx.URL(origin)).before(request)
    else:
        with pytest.raises(Failure, match=r"names|HTTP|token|address"):
            Guard(httpx.URL(origin)).before(request)


@pytest.mark.parametrize("first", [False, True], ids=["a redirect", "the registry itself"])
def test_name_that_leads_inwards_at_the_second_look_is_refused(
    server: FakeRegistry, config: Config, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """Its server of names gives an address outside when it is looked at, and the node's own for the connection."""
    monkeypatch.setattr(guard, "_kinds", lambda host: frozenset())
    if not first:
        server.faults["GET manifests"] = lambda number: (307, b"", {"Location": "/v2/a/b/manifests/other"})
    with pytest.raises(Failure, match="has answered from a loopback address, to which its name did not"):
        pull(server, config)


@pytest.mark.parametrize("where", ["manifest", "layer", "cut", "longer"])
def test_changed_bytes_are_found(server: FakeRegistry, image: Image, config: Config, where: str) -> None:
    digest = str(push(server, image).reference.digest)
    if where == "manifest":
        server.manifests["a/b", digest] = server.manifests["a/b", digest].replace(b"front", b"other")
        with pytest.raises(ArtefactInvalid, match="was changed"):
            pull(server, config, at(server).at(digest))
        return
    document = json.loads(server.manifests["a/b", digest])
    key = ("a/b", document["layers"][1]["digest"])
    old = server.blobs[key]
    server.blobs[key] = {"layer": b"X" + old[1:], "cut": old[:-600], "longer": old + b"more"}[where]
    if where == "longer":
        assert pull(server, config) == content(image.path)  # no more than the manifest lists is requested
        return
    with pytest.raises((ArtefactInvalid, Unavailable)):
        pull(server, config)
    assert {path.name for path in config.checkpoint_root.iterdir()} == {"shop"}


def test_full_disk_is_a_reason_and_leaves_nothing(
    server: FakeRegistry, image: Image, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(server, image)
    real = os.statvfs

    def full(path: Path) -> object:
        found = list(real(path))
        found[4] = 0
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", full)
    with pytest.raises(Failure, match="MiB free"):
        pull(server, config)
    assert {path.name for path in config.checkpoint_root.iterdir()} == {"shop"}


def test_other_images_are_not_taken_for_checkpoints(server: FakeRegistry, config: Config) -> None:
    server.manifests["a/b", "v1"] = b'{"schemaVersion": 2, "layers": []}'
    with pytest.raises(ArtefactInvalid, match="not a checkpoint"):
        pull(server, config)
    with pytest.raises(Failure, match="cannot be pulled: HTTP 404"):
        pull(server, config, at(server, tag="v2"))


def test_environment_is_in_no_document_that_a_registry_indexes(server: FakeRegistry, image: Image) -> None:
    reference = push(server, image).reference
    manifest = server.manifests["a/b", reference.digest]
    assert NAME.encode() not in manifest
    assert b'"org.criu.checkpoint.container.name":"web"' in manifest
    assert base64.b64encode(b"registers") not in manifest
