"""A SIGKILL that is sent without the runtime reaches what is frozen, or has begun to be."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kybernate_shim.linux.cgroup.cgroup import Cgroup
from kybernate_shim.oci.commands import Cli
from kybernate_shim.oci.exec_fifo import MAGIC
from kybernate_shim.oci.signals import send


def sent(place: Path, number: int, state: str) -> tuple[int, str]:
    """Send a signal to a process that ends by it, in a cgroup in that state; return its status, and the state then."""
    runc, freezer = place / "runc", place / "freezer.state"
    runc.write_bytes(MAGIC)
    freezer.write_text(f"{state}\n")
    with subprocess.Popen(["sleep", "600"]) as init:
        try:
            assert send(Cli(runc, place, None), init.pid, number, Cgroup(1, {"freezer": place}))
            status = init.wait()
        finally:
            init.kill()
    return status, freezer.read_text()


@pytest.mark.parametrize("state", ["FROZEN", "FREEZING"])
def test_sigkill_thaws(tmp_path: Path, state: str) -> None:
    status, then = sent(tmp_path, 9, state)
    assert status == -9
    assert then.startswith("THAWED")


@pytest.mark.parametrize(("number", "state"), [(15, "FROZEN"), (9, "THAWED")])
def test_nothing_is_thawed_for_another_signal_or_what_runs(tmp_path: Path, number: int, state: str) -> None:
    assert sent(tmp_path, number, state) == (-number, f"{state}\n")
