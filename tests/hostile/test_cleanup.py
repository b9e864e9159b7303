"""Processes of a container that stand in the way of clearing away a killed checkpoint or restore."""

from __future__ import annotations

import time
from pathlib import Path

from kybernate_shim.checkpoint.cleanup import Traces, told_of
from kybernate_shim.delete import OPERATION_SECONDS
from kybernate_shim.linux.cgroup.cgroup import Cgroup
from tests.system.checkpoints import PYTHON
from tests.system.ctr import Ctr, eventually
from tests.unit.checkpoint.hiding import HIDING

HIDING_ONES, EXECUTING = 20, 20
# Starts that many processes that hide their environment, and that many that do nothing but execute themselves.
CROWD = f"""
import os, subprocess
for _ in range({HIDING_ONES}):
    if os.fork() == 0:
        exec({HIDING!r})
again = 'exec sh -c "$0" "$0"'
for _ in range({EXECUTING}):
    subprocess.Popen(["sh", "-c", again, again])
subprocess.Popen(["sleep", "600"]).wait()
"""


def processes(ours: Ctr, id: str) -> list[int]:
    return Cgroup.of(ours.pid(id)).processes()


def hidden(ours: Ctr, id: str) -> list[int]:
    """Return the processes without an environment, once all of them run."""
    pids = processes(ours, id)
    if len(pids) <= HIDING_ONES + EXECUTING:
        return []
    return [pid for pid in pids if not Path(f"/proc/{pid}/environ").read_bytes()]


def test_crowd_that_cannot_be_looked_at_does_not_hold_up_delete(ours: Ctr, tmp_path: Path) -> None:
    """containerd waits 5 s for `delete`, which once polled each of the 20 for half a second."""
    python = Ctr(ours.runtime, ours.namespace, PYTHON)
    with python.running("python3", "-c", CROWD) as id:
        eventually(lambda: len(hidden(ours, id)) >= HIDING_ONES, seconds=40)
        begin = time.monotonic()
        Traces(tmp_path / "file", "", tmp_path, "work").end_programs(seconds=OPERATION_SECONDS)
        assert time.monotonic() - begin < OPERATION_SECONDS
        assert told_of(tmp_path / "file") == []
        assert len(processes(ours, id)) > HIDING_ONES + EXECUTING


def test_process_that_claims_to_be_criu_is_neither_killed_nor_waited_for(ours: Ctr, tmp_path: Path) -> None:
    file = tmp_path / "file"
    with ours.running("sleep", "600", flags=["--env", f"CRIU_CONFIG_FILE={file}"]) as id:
        pid = ours.pid(id)
        eventually(lambda: str(file).encode() in Path(f"/proc/{pid}/environ").read_bytes())
        Traces(file, "", tmp_path, "work").end_programs(seconds=OPERATION_SECONDS)
        assert ours.status(id) == "RUNNING"
