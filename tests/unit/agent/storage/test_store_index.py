"""What a node's registry takes over from an object store that other nodes write to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from kybernate.agent.service.for_shims import Related
from kybernate.agent.storage.replicas import Replicas
from kybernate.agent.storage.store_index import Indexed, index_store
from kybernate.registry.catalogue import Catalogue
from kybernate.registry.model import Filter
from kybernate.registry.schema import IMAGE
from kybernate.store import images
from kybernate.store.chunkstore import ChunkStore
from kybernate.store.errors import StoreUnreachable
from kybernate.store.keys import make_key
from kybernate.store.place import StorePlace, open_store
from kybernate.store.tiers.object import ObjectTier
from kybernate.store.transfer import Transfer
from kybernate_shim.checkpoint.image.manifest import NAME, Lineage, decode, encode
from kybernate_shim.config import Config
from kybernate_shim.messages import fetch_pb2 as wire
from kybernate_shim.ttrpc import RpcError
from tests.unit.cli.saved_image import save

Look = Callable[[], Indexed]


@pytest.fixture
def place(tmp_path: Path) -> StorePlace:
    make_key(tmp_path / "store.key")
    return StorePlace(f"file://{tmp_path}/store", tmp_path / "store.key")


@pytest.fixture
def catalogue(tmp_path: Path) -> Iterator[Catalogue]:
    with Catalogue(f"sqlite:///{tmp_path}/registry.db", node="fresh") as found:
        yield found


@pytest.fixture
def look(place: StorePlace, catalogue: Catalogue) -> Look:
    async def work() -> Indexed:
        store = await open_store(place).open(create=True)
        try:
            return await index_store(ObjectTier(store, place.url), Replicas(lambda: catalogue, Config))
        finally:
            store.close()

    return lambda: asyncio.run(work())


def put(
    place: StorePlace, directory: Path, id: str, time: str = "2026-11-21T05:00:00.000Z", *,
    lineage: Lineage = Lineage(), pod: str = "web",  # noqa: B008  # it cannot change
) -> None:  # fmt: skip
    """Store an image as another node does."""

    async def work() -> None:
        store = await open_store(place).open(create=True)
        await images.put(store, directory, Transfer())
        store.close()

    save(directory, signed=False, namespace="team-a", pod=pod, time=time)
    manifest = decode((directory / NAME).read_bytes())
    (directory / NAME).write_bytes(encode(replace(manifest, id=id, lineage=lineage)))
    asyncio.run(work())


def related(catalogue: Catalogue, config: Config, url: str, name: str, *words: str) -> list[tuple[str, str]]:
    """Return name and id of what a shim of namespace team-a is told."""
    replicas = Replicas(lambda: catalogue, lambda: config, store=lambda: url)
    method = Related(replicas.elsewhere).methods()["Related"]
    request = wire.RelatedRequest(namespace="team-a", name=name, words=words)
    call: Any = None
    answer = asyncio.run(method.handle(request, call))
    return [(image.name, image.id) for image in answer.images]


def known(catalogue: Catalogue) -> dict[str, list[tuple[str, str, str]]]:
    rows = catalogue.list(Filter()).images
    return {row.id: [(one.node, one.tier, one.name) for one in row.replicas] for row in rows}


def test_fresh_registry_gets_what_the_store_has(
    place: StorePlace, catalogue: Catalogue, look: Look, tmp_path: Path
) -> None:
    put(place, tmp_path / "later", "b", "2026-11-22T05:00:00.000Z")
    put(place, tmp_path / "first", "a")
    found = look()
    assert [row.id for row in found.added] == ["a", "b"]
    assert known(catalogue) == {"b": [("", "object", "later")], "a": [("", "object", "first")]}
    assert [row.annotations.generation for row in found.added] == [0, 1]
    assert catalogue.get("team-a/first").replicas[0].place == f"{place.url}#team-a/a"
    assert look() == Indexed([], [])


def test_image_that_was_removed_from_the_store_goes_and_copies_elsewhere_stay(
    place: StorePlace, catalogue: Catalogue, look: Look, tmp_path: Path
) -> None:
    put(place, tmp_path / "gone", "a")
    put(place, tmp_path / "copied", "b")
    look()
    (row,) = [row for row in catalogue.list(Filter()).images if row.id == "b"]
    copy = replace(row.replicas[0], node="other", place="/images/copied", tier="disk")
    catalogue.add(replace(row, replicas=(copy,)))

    async def remove() -> None:
        store: ChunkStore = await open_store(place).open()
        await store.remove("team-a", "a")
        await store.remove("team-a", "b")
        store.close()

    asyncio.run(remove())
    assert look().removed == [f"{place.url}#team-a/a", f"{place.url}#team-a/b"]
    assert known(catalogue) == {"b": [("other", "disk", "copied")]}


def test_recipe_that_cannot_be_read_is_named(
    place: StorePlace, catalogue: Catalogue, look: Look, tmp_path: Path
) -> None:
    put(place, tmp_path / "good", "a")
    put(place, tmp_path / "bad", "b")
    (tmp_path / "store/images/team-a/b").write_bytes(b"{}\n0\n")
    found = look()
    assert list(found.unreadable) == [f"{place.url}#team-a/b"]
    assert known(catalogue) == {"a": [("", "object", "good")]}


def test_store_that_is_away_changes_nothing(
    place: StorePlace, catalogue: Catalogue, look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(place, tmp_path / "kept", "a")
    look()

    async def away(self: ObjectTier) -> dict[str, object]:
        raise StoreUnreachable("the service is away")

    monkeypatch.setattr(ObjectTier, "listed", away)
    with pytest.raises(StoreUnreachable):
        look()
    assert known(catalogue) == {"a": [("", "object", "kept")]}


def test_shims_are_told_what_the_store_has_of_a_lineage(
    place: StorePlace, catalogue: Catalogue, look: Look, tmp_path: Path
) -> None:
    put(place, tmp_path / "first", "a", lineage=Lineage("c0", "", "uid-0"))
    put(place, tmp_path / "second", "b", "2026-11-22T05:00:00.000Z", lineage=Lineage("c0", "a", "uid-1"))
    put(place, tmp_path / "other", "c", lineage=Lineage("c7", "", "uid-7"), pod="db")
    look()
    config = Config(checkpoint_root=tmp_path / "root")
    assert related(catalogue, config, place.url, "", "uid-1") == [("second", "b")]
    assert related(catalogue, config, place.url, "first") == [("second", "b"), ("first", "a")]
    assert related(catalogue, config, place.url, "", "web") == [("second", "b"), ("first", "a")]
    assert related(catalogue, config, "s3://another", "", "web") == []
    with pytest.raises(RpcError):
        related(catalogue, config, place.url, "", *map(str, range(99)))
    row = catalogue.get("b")
    assert (row.lineage, [one.id for one in catalogue.children("a")]) == (Lineage("c0", "a", "uid-1"), ["b"])


def test_what_an_older_release_has_registered_is_read_again(
    place: StorePlace, catalogue: Catalogue, look: Look, tmp_path: Path
) -> None:
    put(place, tmp_path / "first", "a", lineage=Lineage("c0", "", "uid-0"))
    look()
    catalogue.label("a", {"kept": "yes"})
    catalogue.database.write(lambda connection: connection.execute(update(IMAGE).values(origin="", pod_uid="")))
    assert [row.id for row in look().added] == ["a"]
    assert (catalogue.get("a").lineage.origin, catalogue.get("a").annotations.labels) == ("c0", {"kept": "yes"})
    assert not look().added
