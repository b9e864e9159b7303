"""What a process holds of mounts that its container cannot see."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate_shim.linux import descriptors
from kybernate_shim.linux.descriptors import outside


@pytest.fixture
def pid(tmp_path: Path) -> Iterator[int]:
    """A process that has a directory, a file in memory and two ends of a pipe open; stopped, as those of a dump are."""
    fds = [os.open(tmp_path, os.O_RDONLY), os.memfd_create("m"), *os.pipe()]
    with subprocess.Popen(["sleep", "60"], pass_fds=fds, cwd=tmp_path) as process:
        for fd in fds:
            os.close(fd)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        yield process.pid
        process.kill()


def test_what_lies_on_ones_own_mounts_is_inside(pid: int) -> None:
    assert list(outside([pid])) == []


def test_what_lies_on_no_mount_of_the_container_is_named(
    pid: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "mounts_of", lambda pid: iter(()))
    found = list(outside([pid]))
    assert sum(f"is {str(tmp_path)!a}, which is on no mount" in line for line in found) == 2  # descriptor and cwd
    assert {line.split()[2] for line in found} == {"cwd", "root", "exe", "descriptor"}
    assert not [line for line in found if "memfd" in line or "pipe" in line]
