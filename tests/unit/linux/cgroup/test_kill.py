"""Each process of a cgroup is killed where the kernel has no call for that: also of those that fork without end."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from kybernate_shim.linux.cgroup import cgroup as subject
from kybernate_shim.linux.cgroup.cgroup import Cgroup

NO_PROCESS = 1 << 30  # beyond every pid that the kernel gives


def test_processes_are_being_frozen_while_they_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freezer = tmp_path / "freezer.state"
    freezer.write_text("THAWED")
    seen = []

    def processes(_: Cgroup) -> list[int]:
        seen.append(freezer.read_text())
        return [NO_PROCESS]

    monkeypatch.setattr(Cgroup, "processes", processes)
    Cgroup(1, {"freezer": tmp_path})._kill_each()
    assert set(seen) == {"FROZEN"}
    assert freezer.read_text() == "THAWED"


def test_processes_that_appear_without_end_do_not_keep_a_kill_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = itertools.count(NO_PROCESS)
    monkeypatch.setattr(Cgroup, "processes", lambda _: [next(numbers)])
    monkeypatch.setattr(subject, "KILL_SECONDS", 0.01)
    Cgroup(1, {"freezer": tmp_path}).kill()
