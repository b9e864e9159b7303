"""An upgrade replaces the files below daemons and helpers that run on: a worker that these start ends, and says why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKERS = ("kybernate_shim.cuda_worker.worker", "kybernate_shim.cuda_holder.holder", "kybernate_shim.vram_mover.worker")


@pytest.mark.parametrize("name", WORKERS)
def test_worker_says_that_it_is_of_another_release(name: str, tmp_path: Path) -> None:
    """Its messages are not those of the process that has started it, which sees it end, and why."""
    command = [sys.executable, "-m", name, str(tmp_path / "socket")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "was started by a process of another release" in done.stderr.splitlines()[-1]
