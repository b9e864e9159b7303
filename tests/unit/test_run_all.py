"""What `make test` prints: a line for each suite that is good, and the reasons of each that is not."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import pytest

from tests import run_all
from tests.lab import cli, go_programs
from tests.lab.go_programs import KEPT
from tests.lanes import CLUSTERS, LANES
from tests.run_all import (
    REPEATS,
    Suite,
    build_lanes,
    lanes_here,
    repeat_alone,
    run_everything,
    run_side_by_side,
    shared_go_cache,
    suites_in_lab,
    summary,
)  # fmt: skip

REPOSITORY = Path(__file__).parents[2]
PASSES = "def test_right() -> None:\n    print('said by a test')\n"
FAILS_ONCE = """
import pathlib, pytest
MARK = pathlib.Path(__file__).with_name("mark")
@pytest.mark.parametrize("text", ["a b"])
def test_busy(text):
    was_there = MARK.exists()
    MARK.touch()
    assert was_there, "first: the machine is busy"
"""
FAILS_IN_TEARDOWN_TOO = (
    FAILS_ONCE.replace("def test_busy(text):", "def test_busy(text, leaves):")
    + """
@pytest.fixture
def leaves():
    was_there = MARK.exists()
    yield
    assert was_there, "something is left over"
"""
)
FAILS = "def test_wrong() -> None:\n    assert 1 == 2, 'the reason'\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run_all, "ROOT", tmp_path)
    monkeypatch.setattr(run_all, "LOGS", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # each of them is loaded by each run
    (tmp_path / "conftest.py").write_text((Path(__file__).parents[1] / "conftest.py").read_text())
    return tmp_path


def suite(folder: Path, name: str, text: str) -> Suite:
    file = folder / f"test_{name}.py"
    file.write_text(text)
    alone = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    return Suite(name, [*alone, str(file)], alone)


def test_good_suite_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = suite(folder, "good", PASSES)
    run_side_by_side([good], 1)
    assert summary([good]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first.split()[:2] == ["good", "ok"]
    assert first.endswith("1 passed")
    assert others == ["=" * 78, "1 passed, 0 failed, 0 skipped"]


@pytest.mark.parametrize("built", [True, False])
def test_unit_tests_run_beside_the_build_of_the_lab(folder: Path, monkeypatch: pytest.MonkeyPatch, built: bool) -> None:
    began = folder / "began"
    unit = Suite("unit", [sys.executable, "-c", f"open({str(began)!r}, 'w')"], [])
    other = suite(folder, "other", PASSES)

    def build(lanes: Collection[str]) -> bool:
        until = time.monotonic() + 60
        while not began.exists():
            assert time.monotonic() < until, "the unit tests wait for the lab"
            time.sleep(0.01)
        return built

    monkeypatch.setattr(run_all, "build_lanes", build)
    assert run_everything(unit, [other], 1) == built
    assert unit.status == 0
    assert other.good == built


def test_builds_share_a_go_cache_that_is_gone_afterwards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_all, "LOGS", folder / "tests")
    monkeypatch.delenv(KEPT, raising=False)
    with shared_go_cache() as environment:
        assert folder in Path(environment[KEPT]).parents
        assert Path(environment[KEPT]).is_dir()
    assert not Path(environment[KEPT]).exists()
    monkeypatch.setenv(KEPT, str(folder))
    with shared_go_cache() as environment:
        assert environment[KEPT] == str(folder)
    assert folder.is_dir()


def test_go_cache_of_a_killed_run_is_removed_by_the_next_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_all, "LOGS", folder / "tests")
    monkeypatch.delenv(KEPT, raising=False)
    program = (
        "import os, signal, sys; from pathlib import Path; from tests import run_all\n"
        f"run_all.LOGS = Path({str(folder / 'tests')!r})\n"
        "with run_all.shared_go_cache() as environment:\n"
        f"    Path(environment[{KEPT!r}], 'modules').mkdir()\n"
        f"    print(environment[{KEPT!r}], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    argv = [sys.executable, "-c", program]
    killed = subprocess.run(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=False)
    left = Path(killed.stdout.strip())
    assert Path(left, "modules").is_dir()
    with shared_go_cache() as first, shared_go_cache() as second:
        assert not left.exists()
        assert Path(first[KEPT]).is_dir(), "another run removes the cache of one that is not over"
        assert first[KEPT] != second[KEPT]


def test_number_of_nodes_side_by_side_is_not_that_of_a_cluster(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(run_all, "LOGS", folder / "tests")
    monkeypatch.setenv("NODES", "4")  # as make exports it
    monkeypatch.setenv("DEFAULT_RUNTIME", "kybernate")
    asked: list[list[str]] = []

    def run(argv: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        asked.append(argv[2:])
        return subprocess.CompletedProcess(argv, 0)

    monkeypatch.setattr(run_all.subprocess, "run", run)
    assert build_lanes((*LANES, *CLUSTERS))
    parsed = [cli.parse(argv) for argv in asked]  # raises SystemExit where it is wrong
    assert [one.lane for one in parsed] == [*LANES, *CLUSTERS]
    assert {(one.nodes, one.default_runtime) for one in parsed} == {(1, "runc")}


def test_lane_whose_programs_cannot_be_built_is_left_out_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(go_programs, "lacking", lambda name: "no proxy answers" if name == "runc" else None)
    lanes = lanes_here()
    assert lanes == ("trixie", "sid", *CLUSTERS)
    assert capsys.readouterr().out == "lane next is left out, with its tests: no proxy answers\n"
    names = [suite.name for suite in suites_in_lab(lanes)]
    assert names
    assert not any(name.startswith("next") for name in names)
    monkeypatch.setattr(go_programs, "lacking", lambda name: None)
    assert lanes_here() == (*LANES, *CLUSTERS)
    assert capsys.readouterr().out == ""


def test_failure_is_told_when_it_happens_and_in_full_in_the_end(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suites = [suite(folder, "good", PASSES), suite(folder, "bad", PASSES + FAILS)]
    run_side_by_side(suites, 2)
    during = capsys.readouterr().out
    assert "[bad] failed in call: " in during
    assert summary(suites) == 1
    after = capsys.readouterr().out
    assert "AssertionError: the reason" in after
    assert "all of its output is in bad.log" in after
    assert "said by a test" not in after
    assert after.splitlines()[-1] == "2 passed, 1 failed, 0 skipped"
    assert "1 failed, 1 passed" in (folder / "bad.log").read_text()


@pytest.mark.parametrize(
    ("program", "reason"),
    [("print('last words'); raise SystemExit(3)", "last words"), ("print('0 tests')", "0 tests")],
    ids=["ends early", "runs no test"],
)
def test_suite_without_a_test_is_a_failure_with_its_last_words(
    folder: Path, capsys: pytest.CaptureFixture[str], program: str, reason: str
) -> None:
    lost = Suite("lost", [sys.executable, "-c", program], [sys.executable])
    run_side_by_side([lost], 1)
    assert summary([lost]) == 1
    said = capsys.readouterr().out
    assert reason in said
    assert said.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"


@pytest.mark.parametrize("text", [FAILS_ONCE, FAILS_IN_TEARDOWN_TOO], ids=["call", "call and teardown"])
def test_what_passes_alone_is_good_and_named(folder: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    suites = [suite(folder, "good", PASSES), suite(folder, "busy", PASSES + text)]
    run_side_by_side(suites, 1)
    assert summary(suites, repeat_alone(suites)) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == [
        "failed with others, passed alone: [busy] test_busy.py::test_busy[a b]",
        "3 passed, 0 failed, 0 skipped",
    ]
    assert any("first: the machine is busy" in line for line in said)


@pytest.mark.parametrize("text", [FAILS, FAILS_ONCE + FAILS, "raise SystemExit(3)"], ids=["always", "one", "suite"])
def test_what_fails_alone_too_stays_a_failure(folder: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    suites = [suite(folder, "good", PASSES), suite(folder, "bad", PASSES + text)]
    run_side_by_side(suites, 1)
    again = repeat_alone(suites)
    assert not again
    assert summary(suites, again) == 1
    assert "passed alone" not in capsys.readouterr().out


def test_many_failures_are_not_repeated(folder: Path) -> None:
    many = "".join(FAILS.replace("test_wrong", f"test_wrong_{number}") for number in range(REPEATS + 1))
    suites = [suite(folder, "busy", FAILS_ONCE), suite(folder, "bad", many)]
    run_side_by_side(suites, 1)
    assert not repeat_alone(suites)
    assert not (folder / "busy-again.log").exists()


def test_suite_that_failed_without_a_test_is_not_repeated(folder: Path) -> None:
    broken = suite(folder, "broken", PASSES)
    broken.argv = [sys.executable, "-c", "print('2 passed in 1 s'); raise SystemExit(1)"]
    run_side_by_side([broken], 1)
    assert not repeat_alone([broken])
    assert not (folder / "broken-again.log").exists()
