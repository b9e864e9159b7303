"""An upgrade replaces the files below daemons, helpers and workers that run on: what they start must still be found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STARTED = {
    "kybernate_shim.cuda.helper": "cuda_helper/helper.py",
    "kybernate_shim.cuda.worker": "cuda_worker/worker.py",
    "kybernate_shim.cuda.arena.kernel": "cuda_worker/kernel.py",
    "kybernate_shim.cuda.arena.holder": "cuda_holder/holder.py",
    "kybernate_shim.cuda.vram.worker": "vram_mover/worker.py",
    "kybernate_shim.cuda.vram.pool_filling": "vram_io/pool_filling.py",
}
WORKERS = ("kybernate_shim.cuda.worker", "kybernate_shim.cuda.arena.holder", "kybernate_shim.cuda.vram.worker")


@pytest.mark.parametrize("name", WORKERS)
def test_worker_says_that_it_is_of_another_release(name: str, tmp_path: Path) -> None:
    """Its messages are not those of the process that has started it, which sees it end, and why."""
    command = [sys.executable, "-m", name, str(tmp_path / "socket")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "was started by a process of another release" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", STARTED)
def test_program_of_an_earlier_release_is_found_by_its_name(name: str) -> None:
    code = f"import importlib.util; print(importlib.util.find_spec({name!r}).origin)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert Path(found.strip()) == ROOT / "kybernate_shim" / STARTED[name]
