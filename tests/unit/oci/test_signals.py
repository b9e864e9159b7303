"""A SIGKILL that is sent without the runtime reaches what is frozen, or has begun to be."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kybernate_shim.linux.cgroup.cgroup import Cgroup
from kybernate_shim.oci.commands import Cli
from kybernate_shim.oci.exec_fifo import MAGIC
from kybernate_shim.oci.signals import send


@pytest.mark.parametrize("state", ["FROZEN", "FREEZING"])
def test_sigkill_thaws(tmp_path: Path, state: str) -> None:
    runc = tmp_path / "runc"
    runc.write_bytes(MAGIC)
    freezer = tmp_path / "freezer.state"
    freezer.write_text(f"{state}\n")
    with subprocess.Popen(["sleep", "600"]) as init:
        try:
            assert send(Cli(runc, tmp_path, None), init.pid, 9, Cgroup(1, {"freezer": tmp_path}))
            assert init.wait() == -9
        finally:
            init.kill()
    assert freezer.read_text().startswith("THAWED")


@pytest.mark.parametrize(("number", "state"), [(15, "FROZEN"), (9, "THAWED")])
def test_nothing_is_thawed_for_another_signal_or_what_runs(tmp_path: Path, number: int, state: str) -> None:
    runc = tmp_path / "runc"
    runc.write_bytes(MAGIC)
    freezer = tmp_path / "freezer.state"
    freezer.write_text(f"{state}\n")
    with subprocess.Popen(["sleep", "600"]) as init:
        try:
            assert send(Cli(runc, tmp_path, None), init.pid, number, Cgroup(1, {"freezer": tmp_path}))
        finally:
            init.kill()
    assert freezer.read_text() == f"{state}\n"
