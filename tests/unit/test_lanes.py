"""What runs in which lane: every file of tests somewhere, and what meets a lane's own programs in all of them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.lanes import CLUSTERS, DEBIANS, LANES, PARTS, TESTS, Part, all_files, order, owner
from tests.run_all import suites_in_lab

DOCUMENTED = TESTS.parent / "docs/development.md"
# All that this file knows of: what drives containerd, runc or CRIU, and is worth nothing in one lane alone. What of a
# GPU's tests meets CRIU and the driver alone is in both of Debian's, since the CRIU of `next` is that of `sid`.
IN_EVERY_LANE = (
    *("contract/test_runtime_lifecycle.py", "contract/test_freezer.py", "contract/cuda_driver/test_cuda_criu.py"),
    *("system/test_checkpoint.py", "system/test_restore_failures.py", "system/test_run.py", "system/test_cri.py"),
    *("system/test_agent.py", "system/test_doctor.py", "hostile/test_images.py"),
    *("system/gpu/test_checkpoint.py", "system/gpu/test_pods.py", "system/gpu/test_nvidia_runtime.py"),
    "system/gpu/arena/test_checkpoint.py",
)
OF_DEBIANS = ("system/gpu/test_criu.py", "system/gpu/daemon_killed/test_in_dump.py")


def test_every_file_belongs_to_one_part() -> None:
    assert sorted(file for part in PARTS for file in part.files()) == all_files()


def test_each_file_runs_once_in_each_lane_of_its_part() -> None:
    given = [word for suite in suites_in_lab() if "cgroup v2" not in suite.name for word in suite.argv]
    times = Counter(word for word in given if word.startswith("tests/") and word.endswith(".py"))
    assert times == {f"tests/{file.relative_to(TESTS)}": len(owner(file).lanes) for file in all_files()}


def test_suites_have_names_of_their_own() -> None:
    suites = suites_in_lab()
    assert len({suite.log for suite in suites}) == len(suites)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_part_says_why_it_is_not_in_all_lanes(part: Part) -> None:
    assert part.files(), "names nothing that no other part has"
    assert set(part.lanes) <= {*LANES, *CLUSTERS}
    assert bool(part.why) == (part.lanes != LANES)
    assert set(part.lanes) <= set(LANES if part.files()[0].relative_to(TESTS).parts[0] != "cluster" else CLUSTERS)
    for path in part.paths:
        assert (TESTS / path).exists(), path


def test_samples_are_tests_of_parts_that_are_not_in_that_lane() -> None:
    sampled = [(part, sample) for part in PARTS for sample in part.samples]
    assert sampled
    for part, sample in sampled:
        path, _, name = sample.partition("::")
        assert f"\ndef {name}(" in (TESTS / path).read_text(), sample
        assert not set(owner(TESTS / path).lanes) & set(part.lanes[1:]), sample
        assert [suite.name for suite in suites_in_lab() if f"tests/{sample}" in suite.argv] == [
            f"{lane} {part.name}" for lane in part.lanes[1:]
        ]


@pytest.mark.parametrize("path", IN_EVERY_LANE)
def test_what_meets_a_lanes_own_programs_runs_in_every_lane(path: str) -> None:
    assert owner(TESTS / path).lanes == LANES


@pytest.mark.parametrize("path", OF_DEBIANS)
def test_what_meets_criu_with_a_gpu_runs_in_both_of_debians_lanes(path: str) -> None:
    assert owner(TESTS / path).lanes == DEBIANS


def test_lane_that_cannot_be_built_is_left_out_alone() -> None:
    everything, without = suites_in_lab(), suites_in_lab(LANES)
    left_out = {suite.name for suite in everything} - {suite.name for suite in without}
    assert left_out == {f"{lane} {part.name}" for part in PARTS for lane in part.lanes if lane in CLUSTERS} | {
        "machine"
    }


def test_long_parts_begin_first_and_the_lanes_of_one_are_apart() -> None:
    long, short = Part("long", (), 100), Part("short", (), 10)
    alone, last = Part("alone", (), 50, LANES[:1]), Part("last", (), 5, LANES[1:2])
    assert order([last, short, alone, long]) == [
        *((long, LANES[0]), (short, LANES[0])),
        *((long, LANES[2]), (short, LANES[2])),
        *((long, LANES[1]), (alone, LANES[0]), (short, LANES[1]), (last, LANES[1])),
    ]


def test_documented_times_are_those_that_parts_are_placed_by() -> None:
    rows = re.findall(r"^\| ([^|]+) \| ([a-z, -]+) \| (\d+) s \|$", DOCUMENTED.read_text(), re.MULTILINE)
    assert {name: (lanes, int(seconds)) for name, lanes, seconds in rows} == {
        part.name: ("all" if part.lanes == LANES else ", ".join(part.lanes), part.seconds) for part in PARTS
    }


def test_longer_path_has_the_file() -> None:
    folder, file = Part("folder", ("system",), 1), Part("file", ("system/test_run.py",), 1)
    assert owner(TESTS / "system/test_run.py", [folder, file]) is file
    assert owner(TESTS / "system/test_cri.py", [folder, file]) is folder


def test_file_of_no_part_or_of_two_is_named() -> None:
    part = Part("one", ("system/test_run.py",), 1)
    with pytest.raises(ValueError, match=r"test_cri\.py is named by no part"):
        owner(TESTS / "system/test_cri.py", [part])
    with pytest.raises(ValueError, match=r"named by .*'one', 'two'"):
        owner(TESTS / "system/test_run.py", [part, replace(part, name="two")])


def test_time_that_the_documentation_gives_is_the_sum_of_the_parts() -> None:
    (told,) = re.findall(
        r"the parts add up to (\d+) s, so that two CPUs need at least (\d+) minutes", one_line(DOCUMENTED)
    )
    seconds = sum(part.seconds * len(part.lanes) for part in PARTS)
    assert told == (str(seconds), str(round(seconds / 2 / 60)))


def one_line(page: Path) -> str:
    return " ".join(page.read_text().split())
