"""An agent that is killed by SIGKILL at any of its writes and effects leaves nothing that the next one gets wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
PROGRAM = Path(__file__).with_name("killed.py")
LEAST_PLACES = 30


def test_agent_killed_at_every_step_is_followed_by_one_that_ends_everything(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, PROGRAM, tmp_path],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= LEAST_PLACES, done.stdout
