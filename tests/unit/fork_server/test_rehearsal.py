"""What the fork server goes through before it forks is a container's whole life, and leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from kybernate_shim.linux.libc import PR_GET_CHILD_SUBREAPER

ROOT = Path(__file__).parents[3]
# In a process of its own, which may become a subreaper and reap.
REHEARSE = f"""
import ctypes, json, os
from pathlib import Path
from kybernate_shim.oci import runtime
from kybernate_shim.rehearsal import rehearse
released, release = [], runtime.release
async def noted(*arguments):
    released.append(await release(*arguments))
    return released[-1]
runtime.release = noted
before = dict(os.environ)
well = rehearse(2)
reaper = ctypes.c_int(-1)
ctypes.CDLL(None).prctl({PR_GET_CHILD_SUBREAPER}, ctypes.byref(reaper), 0, 0, 0)
children = Path(f"/proc/self/task/{{os.getpid()}}/children").read_text()
fds = len(os.listdir("/proc/self/fd"))
print(json.dumps([well, released, reaper.value, children, dict(os.environ) == before, fds]))
"""


def test_container_lives_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "TTRPC_ADDRESS": "/none"}
    done = subprocess.run([sys.executable, "-c", REHEARSE], env=environment, capture_output=True, check=True)
    assert json.loads(done.stdout) == [2, [True, True], 0, "", True, 4]
    assert done.stderr == b""
    assert list(tmp_path.iterdir()) == []
