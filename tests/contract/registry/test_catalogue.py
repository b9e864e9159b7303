"""The catalogue: what goes in comes out, is found by each of its names, listed in order, and changed without loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kybernate.node.failure import Ambiguous, Failure, Invalid, Missing
from kybernate.registry.beside import read
from kybernate.registry.catalogue import Catalogue
from kybernate.registry.failures import NotKeptBeside
from kybernate.registry.model import EPOCH, Annotations, Filter, ImageRow, Replica, TierTotals
from kybernate_shim.checkpoint.image.manifest import Lineage
from tests.contract.registry.rows import from_source, labelled, row

TEXTS = st.text(st.characters(), max_size=40)
PATIENT = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def added(catalogue: Catalogue, *numbers: int) -> list[ImageRow]:
    return [catalogue.add(row(number)) for number in numbers]


def ids(rows: tuple[ImageRow, ...]) -> list[int]:
    return [int(one.id.partition("-")[0]) for one in rows]


def test_image_comes_back_as_it_was_added(catalogue: Catalogue) -> None:
    image = row(1)
    stored = catalogue.add(image)
    assert stored == replace(image, annotations=Annotations(revision=1, generation=0))
    assert catalogue.get(image.key) == stored
    assert catalogue.add(stored) == stored


def test_image_is_found_by_each_of_its_names(catalogue: Catalogue) -> None:
    (image, _) = added(catalogue, 7, 8)
    for name in (image.key, image.id, "00000007", "image-7", "shop/image-7", "/images/shop/image-7"):
        assert catalogue.get(name) == image
    for name in ("", "0000000", "000", "image", "shop", "bank/image-7", "%", "IMAGE-7", "'; --"):
        with pytest.raises((Missing, Ambiguous), match=r"registry has no image|is the name of") as caught:
            catalogue.get(name)
        assert isinstance(caught.value, Ambiguous) == (name == "0000000")


def test_ambiguous_name_lists_the_images_and_the_node_decides(catalogue: Catalogue, tmp_path: Path) -> None:
    added(catalogue, 1, 2)
    with pytest.raises(Ambiguous, match="2 images: /images/shop/image-2, /images/shop/image-1"):
        catalogue.get("00000")
    mine = catalogue.add(on_disk(tmp_path / "a", 3))
    assert catalogue.get("00000") == mine


@PATIENT
@given(TEXTS, TEXTS, TEXTS)
def test_texts_of_manifests_come_back(catalogue: Catalogue, pod: str, place: str, reason: str) -> None:
    image = from_source(1, pod=pod)
    replica = Replica("node-b", f"/images/{place}", "disk", place, reason=reason, findings=(reason,))
    stored = catalogue.add(replace(image, replicas=(replica,)))
    assert (stored.source.pod, stored.replicas) == (pod, (replica,))
    catalogue.drop_replica(replica.place, node="node-b")


def test_texts_and_numbers_beyond_a_database_are_cut(catalogue: Catalogue) -> None:
    huge = from_source(1, pod="p" * 16_000, namespace="\u20ac" * 16_000)
    place = f"/{'d' * 255}" * 15
    huge = replace(huge, bytes=1 << 70, replicas=(Replica("node-b", place, "disk", "n" * 4000),))
    stored = catalogue.add(huge)
    assert stored.bytes == (1 << 63) - 1
    assert catalogue.get(place) == stored
    assert catalogue.list(Filter(pod="p" * 16_000)).images == (stored,)
    assert catalogue.list(Filter(pod="p" * 15_999)).total == 0
    catalogue.add(replace(row(2), bytes=1 << 63))
    assert catalogue.totals().bytes == 1 << 64


def test_lists_are_newest_first_in_pages_that_lose_nothing(catalogue: Catalogue) -> None:
    added(catalogue, *range(7))
    catalogue.add(replace(row(7), created=row(6).created))  # as old as another
    catalogue.add(replace(row(8), created=None))
    everything = catalogue.list()
    assert sorted(ids(everything.images)[:2]) == [6, 7]
    assert ids(everything.images)[2:] == [5, 4, 3, 2, 1, 0, 8]
    assert (everything.total, everything.token) == (9, "")
    pages: list[ImageRow] = []
    token = ""
    while not pages or token:
        page = catalogue.list(limit=2, token=token)
        assert len(page.images) == 2 or not page.token
        pages += page.images
        token = page.token
        catalogue.add(row(100 + len(pages)))  # what comes meanwhile is newer than the page
    assert tuple(pages) == everything.images


def test_page_token_is_bound_to_its_list(catalogue: Catalogue) -> None:
    added(catalogue, 1, 2, 3)
    token = catalogue.list(Filter(namespace="shop"), limit=1).token
    assert ids(catalogue.list(Filter(namespace="shop"), token=token).images) == [2, 1]
    forged = ["x", "=", "\0", token[:-2], token + "AA", token.swapcase(), "A" * 10_000]
    for bad in forged:
        with pytest.raises(Invalid, match="page token"):
            catalogue.list(Filter(namespace="shop"), token=bad)
    for other in (Filter(), Filter(namespace="bank"), Filter(namespace="shop", pinned=True)):
        with pytest.raises(Invalid, match="page token"):
            catalogue.list(other, token=token)


def test_each_filter_chooses(catalogue: Catalogue) -> None:
    catalogue.add(from_source(1, namespace="bank"))
    catalogue.add(from_source(2, pod="db-0"))
    catalogue.add(replace(row(3), annotations=Annotations(workload="deployment/front")))
    catalogue.add(from_source(4, image="other:2"))
    catalogue.add(row(5, tier="ram", node="node-c"))
    catalogue.add(labelled(6, {"a": "1", "b": "2"}))
    catalogue.add(labelled(7, {"a": "1", "b": "3"}))
    catalogue.pin("image-7")
    for wanted, found in (
        (Filter(namespace="bank"), [1]),
        (Filter(pod="db-0"), [2]),
        (Filter(workload="deployment/front"), [3]),
        (Filter(workload="db-0"), [2]),
        (Filter(source_image="other:2"), [4]),
        (Filter(tier="ram"), [5]),
        (Filter(tier="ram", node="node-b"), []),
        (Filter(node="node-c"), [5]),
        (Filter(labels={"a": "1"}), [7, 6]),
        (Filter(labels={"a": "1", "b": "2"}), [6]),
        (Filter(labels={"a": "2"}), []),
        (Filter(pinned=True), [7]),
        (Filter(namespace="shop", labels={"b": "3"}, pinned=True), [7]),
        (Filter(namespace="' OR 1=1 --"), []),
    ):
        page = catalogue.list(wanted)
        assert ids(page.images) == found, wanted
        assert page.total == len(found)


def test_labels_and_pins_change_alone(catalogue: Catalogue) -> None:
    catalogue.add(labelled(1, {"keep": "1", "drop": "2"}))
    changed = catalogue.label("image-1", {"new": "3"}, removed=["drop", "absent"])
    assert changed.annotations.labels == {"keep": "1", "new": "3"}
    assert catalogue.pin("image-1").annotations.pinned
    same = catalogue.pin("image-1")
    assert (same.annotations.revision, same.annotations.labels) == (3, {"keep": "1", "new": "3"})
    assert not catalogue.pin("image-1", False).annotations.pinned


@pytest.mark.parametrize(
    "labels",
    [{"": "x"}, {"-a": "x"}, {"a b": "x"}, {"a" * 254: "x"}, {"a": "x" * 254}, {"a": "\x1b[2J"}, {"a": "\ud800"}],
)
def test_label_that_is_none_is_refused(catalogue: Catalogue, labels: dict[str, str]) -> None:
    (before,) = added(catalogue, 1)
    with pytest.raises(Invalid, match="label"):
        catalogue.label("image-1", labels)
    with pytest.raises(Invalid, match="label"):
        catalogue.label("image-1", {f"n{number}": "" for number in range(65)})
    assert catalogue.get("image-1") == before


def test_use_is_noted_and_never_goes_back(catalogue: Catalogue) -> None:
    added(catalogue, 1)
    later = EPOCH + timedelta(days=20_000)
    catalogue.used("image-1", 2.5, time=later)
    known = catalogue.used("image-1", time=later - timedelta(hours=1)).annotations
    assert (known.last_used, known.last_restore_seconds) == (later, 2.5)


def test_pinned_image_is_removed_by_force_alone(catalogue: Catalogue) -> None:
    added(catalogue, 1)
    catalogue.pin("image-1")
    with pytest.raises(Failure, match="is pinned"):
        catalogue.remove("image-1")
    catalogue.remove("image-1", force=True)
    assert catalogue.list().total == 0
    with pytest.raises(Missing, match=r"registry has no image|was removed"):
        catalogue.remove("image-1")
    assert catalogue.totals().tiers == ()


def test_replicas_come_and_go_and_the_image_goes_with_the_last(catalogue: Catalogue) -> None:
    (image,) = added(catalogue, 1)
    store = Replica("", "s3://images/1", "s3", "image-1", "copying")
    assert catalogue.put_replica("image-1", store).replicas == (store, *image.replicas)
    whole = replace(store, state="complete", bytes=5)
    assert catalogue.put_replica("image-1", whole).replicas == (whole, *image.replicas)
    catalogue.drop_replica("/images/shop/image-1", node="node-b")
    assert catalogue.get("s3://images/1").replicas == (whole,)
    catalogue.drop_replica("/nothing", node="node-b")
    with pytest.raises(Missing, match=r"registry has no image|was removed"):
        catalogue.checked("s3://images/1", node="node-c")
    catalogue.drop_replica("s3://images/1", node="")
    assert catalogue.list().total == 0


def test_place_that_holds_another_image_now_is_that_ones(catalogue: Catalogue) -> None:
    (old,) = added(catalogue, 1)
    encrypted = replace(old, key=row(2).key, encrypted=True, annotations=replace(old.annotations, revision=4))
    assert catalogue.add(encrypted) == encrypted
    assert catalogue.list().images == (encrypted,)


def test_checked_replica_keeps_what_was_found(catalogue: Catalogue) -> None:
    added(catalogue, 1)
    place, when = "/images/shop/image-1", EPOCH + timedelta(days=20_000)
    (replica,) = catalogue.checked(place, "core-1.img: changed", node="node-b", time=when).replicas
    assert (replica.state, replica.reason, replica.verified) == ("damaged", "core-1.img: changed", when)
    assert replica.findings == ("damaged",)
    (replica,) = catalogue.checked(place, node="node-b").replicas
    assert (replica.state, replica.reason, replica.findings) == ("complete", "", ())
    with pytest.raises(Missing, match=r"registry has no image|was removed"):
        catalogue.checked("/nowhere")


def test_generations_of_a_workload_count_on_after_a_removal(catalogue: Catalogue) -> None:
    for number in (0, 3, 6):  # of pod web-0
        catalogue.add(row(number))
    catalogue.add(row(1))
    other = from_source(9, name="sidecar")
    catalogue.add(replace(other, source=replace(other.source, pod="web-0")))
    catalogue.remove("image-3")
    catalogue.add(replace(row(12), annotations=Annotations(parent=row(6).id)))
    found = catalogue.generations("web-0", namespace="shop", container="app")
    assert [(one.id, one.annotations.generation) for one in found] == [
        (row(12).id, 3), (row(6).id, 2), (row(0).id, 0)
    ]  # fmt: skip
    assert len(catalogue.generations("web-0", namespace="shop")) == 4
    assert catalogue.generations("web-0", namespace="bank") == ()
    assert ids(catalogue.children(row(6).id)) == [12]


def test_images_are_related_by_pod_origin_and_name(catalogue: Catalogue) -> None:
    for number, lineage in enumerate(
        [Lineage("c0", "", "u-0"), Lineage("c0", "id-0", "u-1"), Lineage("c9", "", "u-1")]
    ):
        catalogue.add(row(number, lineage=lineage))
    catalogue.add(from_source(7, namespace="bank", pod="web-0"))
    assert [one.lineage for one in catalogue.related("shop", "", ["web-1"], most=9)] == [Lineage("c0", "id-0", "u-1")]
    assert ids(catalogue.related("shop", "", ["u-1"], most=9)) == [2, 1]
    assert ids(catalogue.related("shop", "", ["c0", ""], most=9)) == [1, 0]
    assert ids(catalogue.related("shop", "image-0", ["c9"], most=9)) == [2, 1, 0]
    assert ids(catalogue.related("shop", "image-0", [], most=1)) == [1]
    assert catalogue.related("shop", "image-7", ["", "u-9"], most=9) == ()
    assert catalogue.related("shop", "", ["'; --"], most=9) == ()
    assert ids(catalogue.related("bank", "", ["web-0"], most=9)) == [7]


def test_parent_is_that_of_the_manifest_or_of_an_older_registry(catalogue: Catalogue) -> None:
    catalogue.add(row(1, lineage=Lineage("c0", "id-0", "u")))
    catalogue.add(row(2, annotations=Annotations(parent="id-0")))
    assert ids(catalogue.children("id-0")) == [2, 1]
    catalogue.pin("image-1")
    assert ids(catalogue.children("id-0")) == [2, 1]
    assert catalogue.get("image-2").lineage.parent == "id-0"


def test_images_of_an_older_release_are_found_until_their_lineage_is_known(catalogue: Catalogue) -> None:
    added(catalogue, 1, 2)
    assert sorted(catalogue.places_without_origin("node-b")) == ["/images/shop/image-1", "/images/shop/image-2"]
    catalogue.add(row(1, lineage=Lineage("c1")))
    assert catalogue.places_without_origin("node-b") == ("/images/shop/image-2",)
    assert catalogue.places_without_origin("node-c") == ()


def test_totals_count_images_once_and_replicas_each(catalogue: Catalogue) -> None:
    added(catalogue, 1, 2)
    catalogue.pin("image-2")
    catalogue.put_replica("image-1", Replica("node-c", "/ram/1", "ram", "1", "damaged", 7))
    totals = catalogue.totals()
    assert (totals.images, totals.bytes, totals.vram_bytes, totals.pinned) == (2, 2003, 2 << 30, 1)
    assert totals.states == {"complete": 2, "damaged": 1}
    assert totals.tiers == (TierTotals("node-b", "disk", 2, 1803), TierTotals("node-c", "ram", 1, 7))


def on_disk(directory: Path, number: int) -> ImageRow:
    directory.mkdir(mode=0o700)
    return replace(row(number), replicas=(Replica("node-a", str(directory), "disk", directory.name),))


def test_change_lies_beside_the_image_before_it_is_acknowledged(catalogue: Catalogue, tmp_path: Path) -> None:
    catalogue.add(on_disk(tmp_path / "a", 1))
    catalogue.label("a", {"x": "1"})
    catalogue.pin("a")
    catalogue.used("a", 3.0)
    stored = catalogue.checked(str(tmp_path / "a"), "bits")
    kept = read(tmp_path / "a")
    assert kept is not None
    assert (kept.image, kept.annotations, kept.damage) == (stored.id, stored.annotations, "bits")
    assert kept.verified == stored.replicas[0].verified
    assert stored.replicas[0].revision == stored.annotations.revision == 4


def test_what_cannot_be_kept_beside_is_not_changed(catalogue: Catalogue, tmp_path: Path) -> None:
    image = on_disk(tmp_path / "a", 1)
    catalogue.add(image)
    (tmp_path / "b").mkdir()
    catalogue.put_replica(image.key, Replica("node-a", str(tmp_path / "b"), "disk", "b"))
    (tmp_path / "b").rmdir()
    before, content = catalogue.get(image.key), read(tmp_path / "a")
    with pytest.raises(NotKeptBeside, match="cannot be written: No such file or directory"):
        catalogue.pin(image.key)
    assert catalogue.get(image.key) == before
    assert read(tmp_path / "a") == content


def test_other_nodes_change_is_written_beside_the_image_later(opened: Callable[..., Catalogue], tmp_path: Path) -> None:
    here, there = opened("node-a"), opened("node-b")
    here.add(on_disk(tmp_path / "a", 1))
    there.label("a", {"from": "there"})
    there.pin("a")
    kept = read(tmp_path / "a")
    assert kept is not None
    assert kept.annotations.revision == 1
    assert [here.write_beside(), here.write_beside()] == [1, 0]
    kept = read(tmp_path / "a")
    assert kept is not None
    assert (kept.annotations.labels, kept.annotations.pinned) == ({"from": "there"}, True)
