"""What the node reports of a container becomes the state of its seat; what it claims becomes a seat."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from kybernate.agent.seats.claims import Claim, assigned, claim_of
from kybernate.agent.seats.facts import Seen, seated, standbys, status_of
from kybernate.agent.seats.messages import schedule_of, seat_message
from kybernate.cli.formats import document_of
from kybernate.messages import agent_pb2 as wire
from kybernate.seats.model import Request, Seat, Status, Turn
from tests.unit.agent.seats.fake_seats import GIB, places

SCHEMA = json.loads((Path(__file__).parents[4] / "docs/schemas/kybernate.schema.json").read_text())
NOW = 1000.0


def seen(state: wire.Container.State = wire.Container.RUNNING, gpu: str = "attached", **more: object) -> Seen:
    container = wire.Container(namespace="k8s.io", id="c", title="c", state=state, gpu=gpu.upper() or "NO_GPU")
    return Seen(container, Claim("g0-s0"), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "gpu", "before", "held", "status"),
    [
        (wire.Container.CREATED, "", None, 0, "free"),
        (wire.Container.RUNNING, "suspended", None, 0, "suspended"),
        (wire.Container.RUNNING, "attached", None, GIB, "active"),
        (wire.Container.RUNNING, "", None, 0, "suspended"),  # it has no memory on a GPU when it is seen first
        (wire.Container.RUNNING, "suspending", Status.ACTIVE, GIB, "suspending"),
        (wire.Container.RUNNING, "resuming", Status.SUSPENDED, 0, "waking"),
        (wire.Container.RUNNING, "checkpointing", Status.SUSPENDED, 0, "suspended"),
        (wire.Container.RUNNING, "attached", Status.STARTING, 0, "active"),
        (wire.Container.CREATED, "", Status.STARTING, 0, "starting"),
        (wire.Container.RUNNING, "restoring", Status.STARTING, 0, "starting"),
        (wire.Container.RUNNING, "attached", Status.SUSPENDED, 0, "suspended"),  # nothing of it was there to suspend
        (wire.Container.RUNNING, "attached", Status.SUSPENDED, GIB, "active"),  # another caller has resumed it
        (wire.Container.RUNNING, "suspended", Status.FAILED, 0, "failed"),
        (wire.Container.RUNNING, "suspended", Status.ACTIVE, 0, "suspended"),  # another caller has suspended it
        (wire.Container.RUNNING, "parking", Status.SUSPENDED, 0, "parking"),
        (wire.Container.RUNNING, "other", Status.ACTIVE, GIB, "active"),  # a shim of another release: its memory counts
        (wire.Container.RUNNING, "other", Status.SUSPENDED, 0, "suspended"),
        (wire.Container.RUNNING, "", Status.ACTIVE, 0, "active"),  # its shim does not answer
    ],
)
def test_status_follows_from_what_the_node_reports(
    state: wire.Container.State, gpu: str, before: Status | None, held: int, status: str
) -> None:
    assert status_of(seen(state, gpu), before, held, acting=False) == status


def test_status_is_the_actions_own_while_one_is_under_way() -> None:
    assert status_of(seen(gpu="suspended"), Status.WAKING, 0, acting=True) == Status.WAKING


def test_what_waits_for_room_is_a_request_as_long_as_it_waits() -> None:
    (place, *_) = places()
    asked = seated(place, seen(gpu="suspended", waits="operation", held_bytes=0), None, NOW, acting=False)
    assert asked.requests == (Request(NOW, "operation"),)
    again = seated(place, seen(gpu="suspended", waits="operation", held_bytes=0), asked, NOW + 1, acting=False)
    assert again.requests == asked.requests
    assert seated(place, seen(gpu="suspended", held_bytes=0), again, NOW + 2, acting=False).requests == ()


@pytest.mark.parametrize(
    ("gpu", "held", "waits", "overlaps"),
    [
        ("suspended", 0, "", True),
        ("attached", GIB, "", True),
        ("attached", 0, "", False),  # it has nothing that a swap could move: it has not used its GPU yet
        ("", 0, "", False),
        ("suspended", 0, "operation", False),
    ],
)
def test_swap_is_for_seats_with_vram_to_move(gpu: str, held: int, waits: str, overlaps: bool) -> None:
    assert (
        seated(places()[0], seen(gpu=gpu, held_bytes=held, waits=waits), None, NOW, acting=False).overlaps is overlaps
    )


def test_operation_that_waits_has_waited_since_it_was_asked_for() -> None:
    found = seated(places()[0], seen(gpu="suspended", waits="operation", waits_since=5.0), None, NOW, acting=False)
    assert found.requests == (Request(5.0, "operation"),)


def test_need_is_declared_else_learned() -> None:
    (place, *_) = places()
    container = wire.Container(id="c", state=wire.Container.RUNNING, gpu="SUSPENDED", vram_bytes=3 * GIB)
    assert seated(place, Seen(container, Claim("g0-s0")), None, NOW, acting=False).need_bytes == 3 * GIB
    declared = seated(place, Seen(container, Claim("g0-s0", vram=5 * GIB)), None, NOW, acting=False)
    assert declared.need_bytes == 5 * GIB


def test_what_takes_more_than_it_declares_shares_no_more() -> None:
    (place, *_) = places()
    container = wire.Container(id="c", state=wire.Container.RUNNING, gpu="ATTACHED")
    small, large = (
        Seen(container, Claim("g0-s0", vram=GIB), 2 * GIB),
        Seen(container, Claim("g0-s0", vram=GIB), 4 * GIB),
    )
    fits = seated(place, small, None, NOW, acting=False)
    assert fits.may_share  # a context is no overrun
    over = seated(place, large, fits, NOW, acting=False)
    assert not over.may_share
    assert not seated(place, small, over, NOW, acting=False).may_share


def test_claims_are_kubelets_for_pods_and_a_profile_for_others() -> None:
    notes = {
        "kyb.ai/seat": "g0-s1",
        "kybernate.io/seat": "one",
        "kybernate.io/vram": "2Gi",
        "kybernate.io/priority": "7",
    }
    spec = {"annotations": notes, "process": {"env": ["NVIDIA_VISIBLE_DEVICES=GPU-1,GPU-2"]}}
    assert claim_of(spec, {}, in_pod=True) == Claim("g0-s1", "", 2 * GIB, visible=("GPU-1", "GPU-2"))
    claim = claim_of(spec, {"kybernate.io/seat": "g0-s2"}, in_pod=False)
    assert claim == Claim("g0-s2", "one", 2 * GIB, 7, visible=("GPU-1", "GPU-2"))
    assert not claim_of({"annotations": {"kybernate.io/vram": "much"}}, {}, in_pod=False)
    labels = {"kybernate.io/priority": "9"}  # which an image may have, but for a container of `kybernate up`
    assert claim_of(spec, labels, in_pod=False).priority == 7
    assert claim_of(spec, labels, in_pod=False, of_up=True).priority == 9
    assert claim_of(spec, {}, in_pod=False, of_up=True).priority == 7
    assert (
        claim_of({"annotations": {"kybernate.io/seat": "one", "kybernate.io/vram": "much"}}, {}, in_pod=False).vram == 0
    )


def test_container_gets_a_seat_of_the_gpus_that_it_sees() -> None:
    known = {place.name: place for place in places(gpus=2)}
    uuids = {0: "GPU-0", 1: "GPU-1"}
    claims = {("d", "a"): Claim(profile="one", visible=("GPU-1",)), ("d", "b"): Claim(profile="one")}
    given = assigned(claims, {}, known, ["g0-s0"], uuids)
    assert given.keys == {"g1-s0": ("d", "a"), "g0-s1": ("d", "b")}
    more = {**claims, ("d", "c"): Claim(profile="one", visible=("GPU-0", "GPU-1"))}
    assert assigned(more, given.keys, known, ["g0-s0"], uuids).lacking == {("d", "c")}


def test_standby_is_for_the_seat_that_a_name_has_meant() -> None:
    keys = {"g0-s0": ("d", "main"), "g0-s1": ("d", "spare")}
    claims = {("d", "main"): Claim("g0-s0"), ("d", "spare"): Claim("g0-s1", stands_by_for="main")}
    containers = {key: wire.Container(id=key[1], title=key[1]) for key in claims}
    names = list(keys)
    assert standbys(keys, claims, containers, names, {}) == {"g0-s1": "g0-s0"}
    left = {"g0-s1": ("d", "spare")}
    assert standbys(left, claims, containers, names, {"g0-s1": "g0-s0"}) == {"g0-s1": "g0-s0"}


def test_document_of_a_seat_is_that_of_the_schema() -> None:
    (place, *_) = places()
    waiting = Seat(place.name, "G0", 1, Status.SUSPENDED, NOW, requests=(Request(NOW, "use", NOW + 5),))
    turn = Turn("g0-s1 is before it", ("g0-s1",), NOW + 9)
    message = seat_message(place, waiting, ("k8s.io", "c"), turn, title="team/web/main")
    document = document_of(message)
    jsonschema.validate(document, {"$ref": "#/$defs/seat", "$defs": SCHEMA["$defs"]})
    assert (document["reason"], document["before"]) == ("g0-s1 is before it", ["g0-s1"])
    assert document["turn_at"] == "1970-01-01T00:16:49.000Z"
    free = seat_message(place, Seat(place.name, "G0", 1), None, None)
    assert free.reason == "no container has it"
    later = seat_message(place, waiting, ("k8s.io", "c"), Turn("waits"))
    assert [one.reason for one in schedule_of([free, later, message]).turns] == ["g0-s1 is before it", "waits"]
