"""The configuration of seats: what it means, and how each mistake in it is named, with its place."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.seats.configuration import Configuration, SeatsInvalid, read_document, read_yaml
from kybernate.seats.groups import Group, Topology, groups_of
from kybernate.seats.model import Rules

DESIGN = """\
profiles:
  - {name: gpu-1x-seat, resource: kyb.ai/gpu-1x-seat, groupSize: 1, seatsPerGroup: 4}
  - {name: gpu-2x-seat, resource: kyb.ai/gpu-2x-seat, groupSize: 2, seatsPerGroup: 3}
gpuTopology:
  groups: [{name: G0, gpus: [0]}, {name: G01, gpus: [0, 1]}]
share: vram
timeZone: Europe/Berlin
rules: {maximumWait: 60, reserve: 1Gi}
schedule:
  - {days: mon-fri, from: "08:00", to: "20:00", prefer: inference}
  - {days: [sat, sun], from: "20:00", to: "08:00", prefer: training}
matrix: {sets: {all: "a & b"}}
withoutAgent: start
"""
SAME_IN_TOML = """
share = "vram"
timeZone = "Europe/Berlin"
withoutAgent = "start"
rules = { maximumWait = 60, reserve = "1Gi" }
matrix = { sets = { all = "a & b" } }
[[profiles]]
name = "gpu-1x-seat"
resource = "kyb.ai/gpu-1x-seat"
groupSize = 1
seatsPerGroup = 4
[[profiles]]
name = "gpu-2x-seat"
resource = "kyb.ai/gpu-2x-seat"
groupSize = 2
seatsPerGroup = 3
[[gpuTopology.groups]]
name = "G0"
gpus = [0]
[[gpuTopology.groups]]
name = "G01"
gpus = [0, 1]
[[schedule]]
days = "mon-fri"
from = "08:00"
to = "20:00"
prefer = "inference"
[[schedule]]
days = ["sat", "sun"]
from = "20:00"
to = "08:00"
prefer = "training"
"""


def test_every_key_is_read() -> None:
    found = read_yaml(DESIGN, "seats.yaml")
    rules = found.rules
    assert (rules.share_vram, rules.maximum_wait, rules.reserve_bytes) == (True, 60, 1 << 30)
    assert str(rules.zone) == "Europe/Berlin"
    assert [(sorted(one.days), one.start, one.end, one.prefer) for one in rules.windows] == [
        ([0, 1, 2, 3, 4], 480, 1200, "inference"),
        ([5, 6], 1200, 480, "training"),
    ]
    assert not found.waits_without_agent
    names = [place.name for place in found.places(flat(2))]
    assert names == ["g0-s0", "g0-s1", "g0-s2", "g0-s3", "g01-s0", "g01-s1", "g01-s2"]


def test_toml_has_the_same_keys() -> None:
    assert read_document(tomllib.loads(SAME_IN_TOML), "agent.toml") == read_yaml(DESIGN, "seats.yaml")


def test_an_empty_document_has_defaults() -> None:
    assert read_yaml("", "seats.yaml") == Configuration(rules=Rules())


PROFILE = "profiles: [{name: one, resource: kyb.ai/one, groupSize: 1, seatsPerGroup: 4}]\n"
MISTAKES = {
    "profiles:\n  - {name: a, resource: b, groupSize: 1, seatsPerGroup: 4}": "2:15: profiles[0].resource must be",
    "profiles:\n  - {name: a, resource: k/b, seatsPerGroup: 4}": "2:5: profiles[0].groupSize is missing",
    "profile: []": "1:1: unknown key profile",
    "rules:\n  slcie: 5": "2:3: unknown key rules.slcie",
    "rules: {slice: fast}": "1:9: rules.slice must be seconds",
    "rules: {maximumWait: 3}": "1:1: rules.maximumWait must be longer",
    "rules: {ramLow: 9Gi}": "1:1: rules.ramHigh must not be below",
    "rules: 5": "1:1: rules must be a mapping",
    "share: some": '1:1: share must be "none" or "vram"',
    "timeZone: Europe/Nowhere": "1:1: timeZone must be a name of the tz database",
    "schedule: [{days: mon, from: 8, to: '09:00', prefer: x}]": "1:24: schedule[0].from must be a time of day",
    "schedule: [{days: moon, from: '08:00', to: '09:00', prefer: x}]": "1:13: schedule[0].days must be days",
    "withoutAgent: run": '1:1: withoutAgent must be "wait" or "start"',
    "matrix: {sets: {a: 'b &'}}": "1:1: matrix.sets.a: a name is missing",
    PROFILE + "gpuTopology: {groups: [{name: G0, gpus: [0, 0]}]}": "2:35: gpuTopology.groups[0].gpus must be",
    PROFILE + "gpuTopology: {groups: [{name: G01, gpus: [0, 1]}]}": "2:24: group G01 has 2 GPUs, as no profile has",
    PROFILE + "gpuTopology: {groups: [{name: G0, gpus: [0]}, {name: g0, gpus: [1]}]}": "more than one group g0",
    "profiles: [": "not YAML",
    "[" * 5000: "not YAML",
}


@pytest.mark.parametrize("text", MISTAKES, ids=[one[:40] for one in MISTAKES])
def test_a_mistake_is_named_with_its_place(text: str) -> None:
    with pytest.raises(SeatsInvalid) as caught:
        read_yaml(text, "seats.yaml")
    assert str(caught.value).startswith("seats.yaml: ")
    assert any(MISTAKES[text] in problem for problem in caught.value.problems)


def test_all_mistakes_are_named_together() -> None:
    with pytest.raises(SeatsInvalid) as caught:
        read_yaml("share: x\nrules: {slice: x}", "seats.yaml")
    assert len(caught.value.problems) == 2


def test_a_group_names_gpus_of_the_node() -> None:
    with pytest.raises(SeatsInvalid, match="group G01 has GPU 1, and the node has 1"):
        read_yaml(DESIGN, "seats.yaml").places(flat(1))


values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 100)
    | st.floats()
    | st.sampled_from(("", "vram", "mon-fri", "08:00", "1Gi")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(("name", "gpus", "from", "to", "days", "sets", "groups", "slice")), inner)
    ),
    max_leaves=8,
)
KEYS = ("profiles", "gpuTopology", "share", "rules", "schedule", "timeZone", "matrix", "withoutAgent")


@given(st.dictionaries(st.sampled_from(KEYS), values))
def test_any_document_is_read_or_refused_in_words(document: dict[str, Any]) -> None:
    try:
        read_document(document, "agent.toml")
    except SeatsInvalid as error:
        pytest.fail("no problem is named") if not error.problems else None


# ---- groups


def flat(count: int, numa: tuple[int, ...] = ()) -> Topology:
    return linked(count, {}, numa)


def linked(count: int, links: dict[tuple[int, int], str], numa: tuple[int, ...] = ()) -> Topology:
    def link(one: int, other: int) -> str:
        return "X" if one == other else links.get((min(one, other), max(one, other)), "SYS")

    return Topology(tuple(tuple(link(a, b) for b in range(count)) for a in range(count)), numa or (0,) * count)


def made(topology: Topology, *sizes: int) -> list[str]:
    return [group.name for group in groups_of(topology, sizes)]


def test_groups_follow_nvlink_before_numa_and_pcie() -> None:
    links = {(0, 2): "NV12", (1, 3): "NV12", (0, 1): "PIX", (2, 3): "PIX"}
    assert made(linked(4, links, (0, 0, 1, 1)), 2) == ["G02", "G13"]


def test_groups_follow_numa_where_links_are_the_same() -> None:
    assert made(linked(4, {(0, 2): "NODE", (1, 3): "NODE"}, (0, 1, 0, 1)), 2) == ["G02", "G13"]


def test_more_nvlinks_are_closer() -> None:
    assert made(linked(4, {(0, 1): "NV4", (0, 2): "NV8", (1, 3): "NV8", (2, 3): "NV4"}), 2) == ["G02", "G13"]


def test_groups_of_all_sizes_overlap() -> None:
    assert made(flat(4), 1, 2, 4) == ["G0", "G1", "G2", "G3", "G01", "G23", "G0123"]


def test_gpus_that_are_left_over_are_in_no_group() -> None:
    assert made(flat(5), 2) == ["G01", "G23"]
    assert made(flat(1), 2) == []


def test_names_of_groups_differ_from_ten_gpus_on() -> None:
    names = made(flat(16), 1, 2, 4, 8, 16)
    assert len(set(names)) == len(names)


@given(st.integers(1, 12), st.sets(st.sampled_from((1, 2, 3, 4, 6, 8)), min_size=1), st.randoms(use_true_random=False))
def test_groups_of_any_topology_divide_its_gpus(count: int, sizes: set[int], random: Any) -> None:
    words = ("NV2", "NV4", "PIX", "PHB", "NODE", "SYS")
    links = {(a, b): random.choice(words) for a in range(count) for b in range(a + 1, count)}
    topology = linked(count, links, tuple(random.choice((-1, 0, 1)) for _ in range(count)))
    for size in sizes:
        found = [one for one in groups_of(topology, sizes) if len(one.gpus) == size]
        used = [gpu for one in found for gpu in one.gpus]
        assert len(set(used)) == len(used)
        assert all(isinstance(one, Group) for one in found)
