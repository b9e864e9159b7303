"""What the lab builds from Go modules is what its go.mod files pin."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documentation import ROOT
from tests.lab import go_programs
from tests.lab.go_programs import OLDEST, PROGRAMS, Programs, lacking
from tests.lab.lanes import LANES, Lane
from tests.lanes import CLUSTERS
from tests.lanes import LANES as CHOSEN

# Asks no proxy, and says what a real one does that cannot reach it: see tests/machine/test_go_proxy.py.
GO = """#!/bin/sh
case "$1 $GOPROXY" in
    env*) echo go1.26.6 ;;
    *serves) echo '{}' ;;
    *silent) sleep 1000 ;;
    *) printf 'go: a note\\ngo: %s: module lookup disabled by GOPROXY=off\\n' "$4" >&2; exit 1 ;;
esac
"""
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


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that has built nothing yet, whose Go is GO; return its cache."""
    program = tmp_path / "go/bin/go"  # where the lab has that of a wheel
    program.parent.mkdir(parents=True)
    program.write_text(GO)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("KYBERNATE_LAB_CACHE", str(tmp_path))
    return tmp_path


def test_lanes_are_left_out_with_one_line_each_where_no_proxy_serves(machine: Path) -> None:
    """In another process: what Go there is, is looked for once."""
    script = "from tests import run_all; print('lanes:', *run_all.lanes_here())"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env={**os.environ, "GOPROXY": "off"}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    *left_out, lanes = done.stdout.splitlines()
    assert done.stderr == ""
    gone = [name for name in (*CHOSEN, *CLUSTERS) if LANES[name].programs]
    assert [line.partition(" is left out, with its tests: no Go module proxy serves ")[0] for line in left_out] == [
        f"lane {name}" for name in gone
    ]
    assert all(line.endswith("module lookup disabled by GOPROXY=off") for line in left_out)
    assert lanes.split()[1:] == [name for name in (*CHOSEN, *CLUSTERS) if name not in gone]


def test_proxy_that_answers_is_no_reason(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(go_programs, "go", lambda: str(machine / "go/bin/go"))
    monkeypatch.setenv("GOPROXY", "serves")
    assert lacking("runc") is None


def test_proxy_that_is_silent_is_waited_for_no_longer_than_said(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a program waited for that Go has started and that holds its output open."""
    monkeypatch.setattr(go_programs, "go", lambda: str(machine / "go/bin/go"))
    monkeypatch.setattr(go_programs, "QUIET_SECONDS", 0.2)
    monkeypatch.setenv("GOPROXY", "silent")
    assert lacking("runc") == "no Go module proxy answers within 0.2 s"


def test_programs_that_are_built_already_need_no_proxy(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(go_programs, "go", lambda: str(machine / "go/bin/go"))
    monkeypatch.setenv("GOPROXY", "off")
    assert "no Go module proxy serves" in (lacking("runc") or "")
    (machine / f"go-runc-{go_programs._identity(PROGRAMS['runc'])}").mkdir()
    assert lacking("runc") is None
