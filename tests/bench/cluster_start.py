"""How long a cluster of the lab takes, from `tests/lab/run` until a command runs in it, once the cache has all of it.

It is measured on the machine itself, because a node of the lab starts no other one, and compared with its bar.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.bench.figures import Pair

ROOT = Path(__file__).resolve().parents[2]
MOST_SECONDS = {1: 12.0, 3: 25.0}  # by the number of nodes
NAMES = tuple(f"cluster.start-{nodes}" for nodes in MOST_SECONDS)
ROUNDS = 4  # after one that builds what the cache lacks


def pairs(lane: str) -> Iterator[Pair]:
    for name, (nodes, most) in zip(NAMES, MOST_SECONDS.items(), strict=True):
        yield Pair(name, partial(_start, lane, nodes), partial(float, most))


def _start(lane: str, nodes: int) -> float:
    """Start a cluster, end it again, and return the seconds until a command's first output."""
    argv = [sys.executable, "tests/lab/run", f"--nodes={nodes}", "--default-runtime=runc", lane, "--", "echo", "up"]
    began = time.monotonic()
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "up\n", "the cluster does not start; see above"
        took = time.monotonic() - began
    assert run.returncode == 0
    return took
