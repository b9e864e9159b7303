"""A rebuild makes the registry what the artefacts say: after any damage, with other nodes, and in one step."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection

from kybernate.node import images
from kybernate.node.failure import Failure, Refused
from kybernate.registry import changes, rebuild
from kybernate.registry.artefacts import Artefacts
from kybernate.registry.beside import Beside, read, write
from kybernate.registry.catalogue import Catalogue
from kybernate.registry.model import Annotations, Filter, Replica
from kybernate_shim.checkpoint.image.manifest import NAME, REGISTRY
from tests.contract.registry.postgresql import empty
from tests.contract.registry.rows import row
from tests.contract.registry.world import ARTEFACTS, NODE, ROWS, Rows, World, contents, new_world, registered

COUNT = 3
DAMAGE = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(ROWS), st.integers(0, COUNT - 1)),
        st.tuples(st.sampled_from(ARTEFACTS), st.integers(0, COUNT - 1)),
        st.tuples(st.just(World.make), st.integers(COUNT, COUNT + 2)),
    ),
    max_size=8,
)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return new_world(Path(tempfile.mkdtemp(dir=tmp_path)))


@pytest.fixture
def two(new_url: Callable[[], str]) -> Iterator[tuple[Catalogue, Catalogue]]:
    with Catalogue(new_url(), node=NODE) as old, Catalogue(new_url(), node=NODE) as new:
        yield old, new


def damaged(world: World, rows: Rows, damage: list[tuple[Any, int]]) -> None:
    for work, number in damage:
        if work in ROWS:
            work(rows, number)
        elif work is World.make:
            if world.place(number) not in world.copies:
                world.make(number)
        elif places := sorted(place for place, one in world.copies.items() if one.number == number):
            work(world, places[0])


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=DAMAGE)
def test_rebuild_after_damage_is_a_rebuild_from_nothing(
    two: tuple[Catalogue, Catalogue], tmp_path: Path, damage: list[tuple[Any, int]]
) -> None:
    world = new_world(Path(tempfile.mkdtemp(dir=tmp_path)))
    old, new = two
    for index in two:
        index.database.write(empty)
    for number in range(COUNT):
        world.add(old, number)
    damaged(world, Rows(world, old), damage)
    foretold = old.check(world.artefacts).differences
    assert old.rebuild(world.artefacts).differences == foretold
    assert registered(old) == world.truth()
    for index in two:
        index.rebuild(world.artefacts)
        assert index.check(world.artefacts).differences == ()
    assert contents(new) == contents(old)


def test_damaged_images_are_rows_with_their_reason(catalogue: Catalogue, world: World) -> None:
    for number in range(6):
        world.add(catalogue, number)
    places = [world.place(number) for number in range(6)]
    world.truncate(places[0])
    world.lose_manifest(places[1])
    world.tear_manifest(places[2])
    world.tear_beside(places[3])
    (places[4] / "core-1.img").unlink()
    catalogue.checked(str(places[5]), "pages-1.img: changed")
    outcome = catalogue.rebuild(world.artefacts)
    assert (outcome.images, outcome.damaged) == (6, 5)
    found = [catalogue.get(str(place)) for place in places]
    words = ("1.img: truncated", "No such file", "not JSON", "", "core-1.img: missing", "1.img: changed")
    for one, word in zip(found, words, strict=True):
        assert word in one.replicas[0].reason
    assert [one.id for one in found] == [f"id-{number}" for number in range(6)]
    assert [bool(one.manifest_digest) for one in found] == [True, False, False, True, True, True]
    assert all(one.annotations.labels["number"] == one.id[-1] for one in found)
    assert found[4].source.pod == "web-4"
    catalogue.checked(str(places[5]))
    catalogue.rebuild(world.artefacts)
    assert catalogue.get(str(places[5])).replicas[0].state == "complete"


def test_everything_that_no_manifest_says_survives_the_database(
    opened: Callable[..., Catalogue], new_url: Callable[[], str], world: World
) -> None:
    catalogue = opened()
    for number in range(3):
        world.add(catalogue, number)
    found = world.artefacts.look(world.make(3))
    assert found is not None
    catalogue.add(replace(found.row, annotations=Annotations(workload="job/a", parent="id-1", labels={"l": "1"})))
    catalogue.used("image-3", 4.5)
    catalogue.checked(str(world.place(3)))
    with Catalogue(new_url(), node=NODE) as new:
        new.rebuild(world.artefacts)
        assert contents(new) == contents(catalogue)
        assert new.get("image-3") == catalogue.get("image-3")
        assert new.get("image-3").annotations.last_restore_seconds == 4.5


def test_rebuild_leaves_what_other_nodes_hold(opened: Callable[..., Catalogue], world: World) -> None:
    here, there = opened(NODE), opened("node-b")
    for number in range(3):
        world.add(here, number)
    shared = here.get("image-0")
    theirs = there.add(row(1, node="node-c"))
    (world.root / "b").mkdir()
    place = str(world.root / "b")
    there.put_replica(shared.key, Replica("node-b", place, "disk", "image-0"))
    there.put_replica(here.get("image-1").key, Replica("", "s3://images/1", "s3", "image-1"))
    there.put_replica(theirs.key, Replica(NODE, "/no/more", "disk", "gone"))
    there.label(shared.key, {"from": "there"})
    world.remove(world.place(0))
    world.remove(world.place(1))
    here.rebuild(world.artefacts)
    assert {one.id: [(each.node, each.place) for each in one.replicas] for one in here.list().images} == {
        "id-0": [("node-b", place)],
        "id-1": [("", "s3://images/1")],
        "id-2": [(NODE, str(world.place(2)))],
        theirs.id: [("node-c", theirs.replicas[0].place)],
    }
    assert here.get("id-0").annotations.labels == {"number": "0", "even": "True", "from": "there"}
    assert here.list(Filter(labels={"number": "1"})).total == 1


def test_rebuild_writes_what_other_nodes_have_changed(opened: Callable[..., Catalogue], world: World) -> None:
    here, there = opened(NODE), opened("node-b")
    world.add(here, 0)
    there.label("image-0", {"from": "there"})
    kinds = [one.kind for one in here.check(world.artefacts).differences]
    assert kinds == ["not kept with it"]
    here.rebuild(world.artefacts)
    kept = read(world.place(0))
    assert kept is not None
    assert kept.annotations == here.get("image-0").annotations
    assert kept.annotations.labels["from"] == "there"
    assert here.check(world.artefacts).differences == ()


def test_what_cannot_be_written_beside_is_reported_and_stays(opened: Callable[..., Catalogue], world: World) -> None:
    here, there = opened(NODE), opened("node-b")
    world.add(here, 0)
    there.label("image-0", {"from": "there"})
    (world.place(0) / REGISTRY).unlink()
    (world.place(0) / REGISTRY).mkdir()
    outcome = here.rebuild(world.artefacts)
    (reason,) = outcome.unwritten
    assert "cannot be written: Is a directory" in reason
    stored = here.get("image-0")
    assert stored.annotations.labels["from"] == "there"
    assert stored.replicas[0].findings == ("labels unreadable",)
    (world.place(0) / REGISTRY).rmdir()
    here.rebuild(world.artefacts)
    assert read(world.place(0)) == Beside("id-0", stored.annotations)


def test_changes_while_the_images_are_read_are_seen(
    opened: Callable[..., Catalogue], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, other = opened(NODE), opened(NODE)
    for number in range(4):
        world.add(here, number)
    scan = Artefacts.scan

    def busy(self: Artefacts, *arguments: Any, **options: Any) -> Any:
        found = scan(self, *arguments, **options)
        world.add(other, 4)
        other.label("image-0", {"late": "1"})
        world.remove(world.place(1))
        other.remove("image-1", force=True)
        world.truncate(world.place(2))
        (world.place(2) / NAME).touch()
        world.move(world.place(3))
        moved = self.look(world.place(3).with_name("image-3-moved"))
        assert moved is not None
        other.add(moved.row)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Artefacts, "scan", busy)
        here.rebuild(world.artefacts)
    truth = world.truth()
    truth[str(world.place(0))][2]["late"] = "1"
    assert registered(here) == truth
    assert here.check(world.artefacts).differences == ()


def test_images_never_vanish_for_readers(opened: Callable[..., Catalogue], world: World) -> None:
    here, reader = opened(NODE), opened("node-b")
    for number in range(3):
        world.add(here, number)
    Rows(world, here).mangle_facts(1)
    seen: list[int] = []

    def look(connection: Connection, plan: rebuild._Plan) -> None:
        apply(connection, plan)
        seen.append(len(reader.list().images))

    apply = rebuild._apply
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rebuild, "_apply", look)
        here.rebuild(world.artefacts)
    assert seen == [3]


def _die(url: str, root: Path, before: str) -> None:
    """Rebuild, and be killed where a statement begins."""
    setattr(changes, before, lambda *arguments, **options: os.kill(os.getpid(), signal.SIGKILL))
    config = replace(images.Config(), checkpoint_root=root / "images", key_directory=root / "keys")
    with Catalogue(url, node=NODE) as catalogue:
        catalogue.rebuild(Artefacts(config, NODE))


@pytest.mark.parametrize("before", ["put_labels", "remove_images"])
def test_kill_leaves_the_old_state(url: str, world: World, before: str) -> None:
    with Catalogue(url, node=NODE) as catalogue:
        for number in range(3):
            world.add(catalogue, number)
        world.remove(world.place(0))
        world.make(7)
        Rows(world, catalogue).mangle_labels(1)
        old = contents(catalogue)
        process = multiprocessing.get_context("spawn").Process(target=_die, args=(url, world.root, before))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert contents(catalogue) == old
        catalogue.rebuild(world.artefacts)
        assert registered(catalogue) == world.truth()


def test_what_cannot_be_looked_into_is_kept(
    catalogue: Catalogue, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        world.add(catalogue, number)
    before = contents(catalogue)
    scandir = os.scandir

    def fails(path: Any) -> Any:
        if str(path).endswith("/shop"):
            raise OSError(5, "Input/output error")
        return scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", fails)
        outcome = catalogue.rebuild(world.artefacts)
    assert outcome.unreadable == {world.root / "images" / "shop": "Input/output error"}
    assert contents(catalogue) == before


def test_rebuild_that_sees_too_little_changes_nothing(
    catalogue: Catalogue, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        world.add(catalogue, number)
    before = contents(catalogue)
    with monkeypatch.context() as patch:
        patch.setattr(images, "MOST_ENTRIES", 2)
        with pytest.raises(Failure, match="too many directories"):
            catalogue.rebuild(world.artefacts)
    (world.root / "images").rename(world.root / "away")
    (world.root / "images").write_text("no directory")
    with pytest.raises(Refused, match="cannot be examined"):
        catalogue.rebuild(world.artefacts)
    assert contents(catalogue) == before


def test_progress_counts_every_place(catalogue: Catalogue, world: World) -> None:
    for number in range(5):
        world.make(number)
    told: list[tuple[int, int]] = []
    catalogue.rebuild(world.artefacts, lambda done, total: told.append((done, total)))
    assert told == [(done, 5) for done in range(1, 6)]


def test_labels_of_a_stranger_are_not_believed(catalogue: Catalogue, world: World) -> None:
    world.add(catalogue, 0)
    place = world.make(1)
    write(place, Beside("id-0", Annotations(9, {"forged": "1"}, pinned=True)))
    catalogue.rebuild(world.artefacts)
    assert catalogue.get("image-1").annotations == Annotations()
    assert catalogue.get("image-1").replicas[0].findings == ("labels unreadable",)
