"""Locks exclude other holders, end with their holder, and are those of the file that others find."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kybernate_shim.linux import locks
from kybernate_shim.linux.locks import held, lock_directory, lock_file, try_lock_directory, try_lock_file

HOLDER = """
import sys
from pathlib import Path
from kybernate_shim.linux.locks import lock_file
lock_file(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


def test_file_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    with held(lock_file(tmp_path / "lock")) as ours:
        assert ours
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("lock", "try_lock"), [(lock_file, try_lock_file), (lock_directory, try_lock_directory)])
def test_second_holder_gets_nothing_until_the_first_releases(
    tmp_path: Path, lock: Callable[[Path], int], try_lock: Callable[[Path], int | None]
) -> None:
    path = tmp_path / "lock"
    if lock is lock_directory:
        path.mkdir()
    with held(lock(path)):
        assert try_lock(path) is None
    with held(try_lock(path)) as ours:
        assert ours


def test_shared_locks_exclude_the_others_only(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with held(lock_file(path, shared=True)), held(lock_file(path, shared=True)) as both:
        assert both
        assert try_lock_file(path) is None


def test_directory_that_is_missing_is_not_made(tmp_path: Path) -> None:
    for lock in (lock_directory, try_lock_directory):
        with pytest.raises(FileNotFoundError):
            lock(tmp_path / "missing")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("lock", [lock_file, lambda path: try_lock_file(path, seconds=60)])
def test_lock_of_a_file_that_its_holder_has_removed_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock: Callable[[Path], int | None]
) -> None:
    path = tmp_path / "lock"
    real, removed = fcntl.flock, []

    def flock(fd: int, kind: int) -> None:
        real(fd, kind)
        if not removed:
            removed.append(fd)
            path.unlink()  # its last holder does that before it closes the file

    monkeypatch.setattr(fcntl, "flock", flock)
    with held(lock(path)) as ours:
        assert ours
        assert try_lock_file(path) is None


def test_wait_with_a_deadline_gets_what_is_released_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, first = tmp_path / "lock", lock_file(tmp_path / "lock")
    monkeypatch.setattr(locks.time, "sleep", lambda seconds: os.close(first))
    with held(try_lock_file(path, seconds=60)) as ours:
        assert ours


def test_wait_without_a_deadline_ends_with_a_killed_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        assert try_lock_file(path) is None
        waiting = threading.Thread(target=lambda: os.close(lock_file(path)))
        waiting.start()
        holder.kill()
        waiting.join(60)
        assert not waiting.is_alive()


def test_descriptors_of_locks_that_were_not_had_are_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with held(lock_file(path)):
        before = os.listdir("/proc/self/fd")  # noqa: PTH208
        assert try_lock_file(path) is None
        assert os.listdir("/proc/self/fd") == before  # noqa: PTH208
