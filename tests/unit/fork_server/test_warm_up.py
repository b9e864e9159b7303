"""What the fork server goes through before it forks is a container's whole life, and leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kybernate_shim.fork_server import place, server, warm_up

ROOT = Path(__file__).parents[3]
PR_GET_CHILD_SUBREAPER = 37  # source: linux/prctl.h
# In a process of its own, which may become a subreaper and reap.
WARM_UP = f"""
import ctypes, gc, json, os
from pathlib import Path
from kybernate_shim.oci import runtime
from kybernate_shim.fork_server.warm_up import warm_up
released, release = [], runtime.release
async def noted(*arguments):
    released.append(await release(*arguments))
    return released[-1]
runtime.release = noted
before = dict(os.environ)
gc.disable()
well = warm_up(2)
garbage = gc.collect()
reaper = ctypes.c_int(-1)
ctypes.CDLL(None).prctl({PR_GET_CHILD_SUBREAPER}, ctypes.byref(reaper), 0, 0, 0)
children = Path(f"/proc/self/task/{{os.getpid()}}/children").read_text()
fds = len(os.listdir("/proc/self/fd"))
print(json.dumps([well, released, reaper.value, children, dict(os.environ) == before, fds, garbage]))
"""


def test_container_lives_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "TTRPC_ADDRESS": "/none"}
    done = subprocess.run([sys.executable, "-c", WARM_UP], env=environment, capture_output=True, check=True)
    *left, garbage = json.loads(done.stdout)
    assert left == [2, [True, True], 0, "", True, 4]
    assert garbage < 100  # of which a life makes hundreds
    assert done.stderr == b""
    assert list(tmp_path.iterdir()) == []


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(warm_up, "_live", fail)


def test_defect_that_it_meets_is_logged_and_keeps_no_server_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "DIRECTORY", str(tmp_path / "fork-server"))
    failing(monkeypatch, KeyError("pid"))
    server._rehearse()
    line = json.loads((tmp_path / "fork-server.log").read_text())
    assert (line["event"], line["level"], line["error"]) == ("warm_up.failed", "warning", "KeyError: 'pid'")
    assert "in fail" in line["exception"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), TimeoutError()])
def test_node_that_has_no_room_or_time_for_it_goes_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    monkeypatch.setattr(place, "DIRECTORY", str(tmp_path / "fork-server"))
    failing(monkeypatch, error)
    server._rehearse()
    assert list(tmp_path.iterdir()) == []
