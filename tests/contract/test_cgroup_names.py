"""Names of cgroups as the kernel shows them: a program that may make cgroups chooses them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate_shim.arena.accounts import account_of
from kybernate_shim.linux.cgroup.hierarchies import UNIFIED, directories, read_names

pytestmark = pytest.mark.root
OTHERS = "kubepods/pod11111111-1111-1111-1111-111111111111"


@pytest.fixture
def asleep() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("end", ["\x1c", "\x0b", "\r", "\x85", "\u2028", "\udcff"])
def test_name_of_a_cgroup_is_one_name_whatever_it_has(asleep: subprocess.Popen[bytes], end: str) -> None:
    """Else a process would be taken for one of the cgroup that the second half names."""
    own = {
        controller: path for controller, path in directories(os.getpid()).items() if controller in (UNIFIED, "memory")
    }
    names = read_names(os.getpid())
    for controller, directory in own.items():
        forged = f"x{end}9:{controller}:"
        below = directory / forged / OTHERS
        below.mkdir(parents=True)
        try:
            (below / "cgroup.procs").write_text(str(asleep.pid))
            assert read_names(asleep.pid)[controller] == f"{names[controller].rstrip('/')}/{forged}/{OTHERS}"
            assert read_names(asleep.pid).keys() == names.keys()
            assert account_of(asleep.pid)
        finally:
            (directory / "cgroup.procs").write_text(str(asleep.pid))
            left: Path = below
            while left != directory:
                left.rmdir()
                left = left.parent
