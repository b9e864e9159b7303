"""What the lab builds from Go modules is what its go.mod files pin."""

from __future__ import annotations

import re

import pytest

from tests.lab import go_programs
from tests.lab.go_programs import OLDEST, PROGRAMS, Programs
from tests.lab.lanes import LANES, Lane

STAMPED = re.compile(r"[vV]ersion=(v\S+)")


@pytest.mark.parametrize("programs", PROGRAMS.values(), ids=list(PROGRAMS))
def test_stamped_version_is_the_pinned_one(programs: Programs) -> None:
    pinned = (programs.folder / "go.mod").read_text()
    modules = {package for package in programs.packages.values() if package != "."}
    for version in STAMPED.findall(" ".join(programs.flags)):
        assert re.search(rf"^\s*(?:require )?\S+ {re.escape(version)}( // indirect)?$", pinned, re.MULTILINE), version
    for package in modules:
        assert any(package.startswith(module) for module, _ in re.findall(r"(\S+) (v\S+)", pinned)), package


@pytest.mark.parametrize("programs", PROGRAMS.values(), ids=list(PROGRAMS))
def test_go_that_the_lab_takes_is_new_enough_for_every_module(programs: Programs) -> None:
    found = re.search(r"^go ([\d.]+)$", (programs.folder / "go.mod").read_text(), re.MULTILINE)
    assert found
    assert tuple(map(int, found[1].split("."))) <= OLDEST
    assert go_programs.WHEEL.endswith(".".join(map(str, OLDEST)))


@pytest.mark.parametrize("lane", LANES.values(), ids=list(LANES))
def test_programs_of_a_lane_exist(lane: Lane) -> None:
    assert set(lane.programs) | set(lane.extras) <= PROGRAMS.keys()
