"""Notices of version 2, which are inotify's and so can be made with an ordinary file."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest

from kybernate_shim.linux.cgroup.cgroup import Cgroup
from kybernate_shim.linux.cgroup.oom import OomWatch, oom_kills


def events(directory: Path, kills: int, maximum: int = 0) -> None:
    (directory / "memory.events").write_text(f"low 0\nhigh 0\nmax {maximum}\noom {kills}\noom_kill {kills}\n")


def readable(watch: OomWatch) -> bool:
    return bool(select.select([watch], [], [], 0)[0])


def test_kill_is_reported_once(tmp_path: Path) -> None:
    events(tmp_path, kills=3)
    watch = OomWatch(Cgroup(2, {"": tmp_path}))
    assert not readable(watch)
    assert not watch.read()
    events(tmp_path, kills=4)
    assert readable(watch)
    assert watch.read()
    assert not watch.read()
    assert not readable(watch)
    watch.close()


def test_other_events_are_no_kill(tmp_path: Path) -> None:
    events(tmp_path, kills=0)
    watch = OomWatch(Cgroup(2, {"": tmp_path}))
    events(tmp_path, kills=0, maximum=9)
    assert readable(watch)
    assert not watch.read()
    assert not readable(watch)
    watch.close()


def test_kill_is_found_without_a_notice(tmp_path: Path) -> None:
    events(tmp_path, kills=0)
    cgroup = Cgroup(2, {"": tmp_path})
    events(tmp_path, kills=2)
    assert oom_kills(cgroup) == 2


def test_cgroup_that_is_gone_is_quiet(tmp_path: Path) -> None:
    events(tmp_path, kills=1)
    watch = OomWatch(Cgroup(2, {"": tmp_path}))
    (tmp_path / "memory.events").unlink()
    assert not watch.read()
    assert not readable(watch)
    assert oom_kills(Cgroup(2, {"": tmp_path / "gone"})) == 0
    watch.close()


def test_cgroup_without_memory_controller_is_refused_and_leaks_nothing(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")  # noqa: PTH208  # iterdir would open one more
    for version in (1, 2):
        with pytest.raises(FileNotFoundError):
            OomWatch(Cgroup(version, {"": tmp_path, "memory": tmp_path}))
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208
