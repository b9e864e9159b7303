"""Which image a pod's container starts from, at its first start and when it starts again: the table of the rules."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.checkpoint.image.requested import Wanted
from kybernate_shim.checkpoint.image.starts import (
    MOST_SHORT_RUNS,
    SOON,
    KnownImage,
    OnRestart,
    Run,
    Start,
    is_given_up,
    on_restart,
    start_of,
)
from kybernate_shim.errors import Refused
from kybernate_shim.trust.requester import Requester

POD = Requester("tenant", "team-a", "web-0", "uid-1", "main", "sandbox")
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def made(minute: int, container: str, *, parent: str = "", origin: str = "c0", pod: str = "old", uid: str = "uid-0",
         of: str = "main") -> KnownImage:  # fmt: skip
    """Return an image whose name says when it was made, in which container."""
    name = f"{container}-{minute}"
    return KnownImage(
        name,
        f"id of {name}",
        BEGIN + timedelta(minutes=minute),
        container,
        of,
        pod,
        uid,
        origin,
        parent and f"id of {parent}",
    )


@dataclass(frozen=True)
class Case:
    """`name`: what it starts from, "" for a fresh start; `error`: words of the refusal instead."""

    wanted: str
    restart: OnRestart
    images: tuple[KnownImage, ...]
    runs: tuple[Run, ...]
    name: str = ""
    error: str = ""
    optional: bool = False


FIRST = made(1, "c0")
OWN = made(5, "c1", parent="c0-1", uid="uid-1", pod="web-0")
NEWER = made(6, "c1", parent="c0-1", uid="uid-1", pod="web-0")
ELSEWHERE = made(5, "c5", parent="c0-1", uid="uid-5", pod="other")  # restored in another pod
LATER = made(9, "c0")  # of the source, which ran on
SIDECAR = made(8, "c9", uid="uid-1", pod="web-0", of="sidecar", origin="c9")
BEFORE = made(3, "c7", pod="web-0", uid="uid-of-before", origin="c7")
RAN = (Run(FIRST.id, 4000),)

CASES = {
    "first start from a name": Case("c0-1", "latest", (FIRST,), (), "c0-1"),
    "first start from a name that is elsewhere": Case("far", "latest", (FIRST,), (), "far"),
    "first start, whatever a restart does": Case("c0-1", "fresh", (FIRST,), (), "c0-1"),
    "images of other containers of the pod are none of this one's": Case(
        "c0-1", "latest", (FIRST, SIDECAR), (), "c0-1"
    ),
    "starts again, from its own newest": Case("c0-1", "latest", (FIRST, OWN, NEWER, LATER), RAN, "c1-6", optional=True),
    "starts again on a node that knows of no run": Case("c0-1", "latest", (FIRST, OWN), (), "c1-5", optional=True),
    "starts again without an image of its own": Case("c0-1", "latest", (FIRST, LATER), RAN, "c0-1", optional=True),
    "starts again, and the image is gone": Case("c0-1", "latest", (), RAN, "c0-1", optional=True),
    "same": Case("c0-1", "same", (FIRST, OWN, NEWER), RAN, "c0-1"),
    "fresh": Case("c0-1", "fresh", (FIRST, OWN), RAN),
    "fresh on a node that knows of no run": Case("c0-1", "fresh", (FIRST, OWN), ()),
    "latest, and no pod of this name was there": Case("latest", "latest", (FIRST, LATER), ()),
    "latest of a pod of this name": Case("latest", "latest", (FIRST, BEFORE, LATER), (), "c7-3"),
    "latest, starts again": Case("latest", "latest", (BEFORE, OWN), RAN, "c1-5", optional=True),
    "latest, same, starts again": Case("latest", "same", (BEFORE, OWN), RAN, "c1-5"),
    "latest, and an image is called so": Case(
        "latest",
        "latest",
        (KnownImage("latest", "i", BEGIN, "c", "main", "p", "u", "c", ""),),
        (),
        error="also the name of an image .*kybernate import team-a/latest NAME",
    ),
    "latest of a name, without descendants": Case("c0-1@latest", "latest", (FIRST,), (), "c0-1"),
    "latest of a name, which is elsewhere": Case("far@latest", "latest", (FIRST,), (), "far"),
    "latest of a name, of the same container": Case("c0-1@latest", "latest", (FIRST, LATER), (), "c0-9"),
    "latest of a name, over a restore": Case("c0-1@latest", "latest", (FIRST, ELSEWHERE), (), "c5-5"),
    "latest of a name, over an image that was removed": Case(
        "c0-1@latest", "latest", (FIRST, made(4, "c2", parent="c1-2"), made(7, "c3", parent="c2-4")), (), "c3-7"
    ),
    "latest of a name, older ones do not count": Case("c0-9@latest", "latest", (FIRST, LATER), (), "c0-9"),
    "latest of a name, of another lineage": Case("c0-1@latest", "latest", (FIRST, SIDECAR, BEFORE), (), "c0-1"),
    "latest of a name, of which several live": Case(
        "c0-1@latest",
        "latest",
        (FIRST, made(4, "r1", parent="c0-1"), made(5, "r2", parent="c0-1")),
        (),
        error="2 containers descend from c0-1.*r1-4, r2-5.*name the one",
    ),
    "latest of a name whose source ran on": Case(
        "c0-1@latest", "latest", (FIRST, ELSEWHERE, LATER), (), error="2 contain"
    ),
    "a path": Case("/mnt/images@home/c0-1", "latest", (FIRST,), (), "/mnt/images@home/c0-1"),
    "another word after @": Case("c0-1@newest", "latest", (FIRST,), (), error="expected NAME, NAME@latest or latest"),
    "no name before @": Case("@latest", "latest", (FIRST,), (), error="expected NAME, NAME@latest or latest"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_container_starts_from(case: Case) -> None:
    wanted = Wanted(case.wanted, "annotation x")

    def look() -> Start:
        return start_of(wanted, case.restart, POD, case.images, case.runs)

    if case.error:
        with pytest.raises(Refused, match=case.error) as refused:
            look()
        assert "Nothing was restored" in str(refused.value)
        return
    start = look()
    assert (start.name, start.optional) == (case.name, case.optional)
    assert start.why


def test_order_of_the_images_does_not_matter() -> None:
    images = [FIRST, OWN, NEWER, LATER, SIDECAR, BEFORE]
    wanted = Wanted("latest", "annotation x")
    assert len({start_of(wanted, "latest", POD, images[n:] + images[:n], ()).name for n in range(6)}) == 1


def test_a_pod_without_a_uid_has_no_images_of_its_own() -> None:
    unnamed = Requester("tenant", "team-a", "web-0", "", "main", "sandbox")
    nameless = made(4, "c1", uid="", pod="other")
    assert start_of(Wanted("c0-1", "x"), "latest", unnamed, (FIRST, nameless), ()).name == "c0-1"


AGAIN = Start("n", "", optional=True, again=True)


@pytest.mark.parametrize(
    ("runs", "given_up"),
    [
        ([], False),
        ([("i", 5.0)] * (MOST_SHORT_RUNS - 1), False),
        ([("i", 5.0)] * MOST_SHORT_RUNS, True),
        ([("i", 5.0)] * MOST_SHORT_RUNS + [("", 1.0)], True),  # the fresh run has ended, too
        ([("i", SOON)] * 5, False),
        ([("i", SOON), *[("i", 5.0)] * 2], False),
        ([("i", 5.0), ("j", 5.0), ("i", 5.0)], False),
    ],
)
def test_image_is_given_up_after_short_runs(runs: list[tuple[str, float]], given_up: bool) -> None:
    assert is_given_up("i", AGAIN, [Run(*run) for run in runs]) is given_up
    assert not is_given_up("i", Start("n", ""), [Run(*run) for run in runs])  # this image is asked for


@given(st.lists(st.sampled_from(["i", "j"]), max_size=12))
def test_a_crash_loop_ends(images: list[str]) -> None:
    """Whatever has been before, an image that holds the end of its program is restored a limited number of times."""
    runs = [Run(image, 1.0) for image in images]
    restored = 0
    while not is_given_up("i", AGAIN, runs):
        runs.append(Run("i", 1.0))
        restored += 1
    assert restored <= MOST_SHORT_RUNS


@pytest.mark.parametrize(("text", "meaning"), [("", "latest"), ("latest", "latest"), ("same", "same")])
def test_annotation_of_restarts(text: str, meaning: str) -> None:
    assert on_restart(text) == meaning


def test_unknown_word_for_restarts_is_refused() -> None:
    with pytest.raises(Refused, match=r"on-restart: expected fresh, same or latest, found 'newest'"):
        on_restart("newest")
