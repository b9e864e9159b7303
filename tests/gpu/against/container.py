"""Checkpoints and restores a whole container of one side, through the arena; runs in that side's process.

The process has a mount namespace of its own, in which the node's places (containerd's socket, the helper's, the arena)
are the side's: two nodes of different versions coexist, and do not see each other. Settings are written before
each step, because the container sees the machine's /etc, and must not find mounts there. Between two questions the
container is an image in memory, and the GPU is the other side's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.gpu.against.timeline import Span, spans
from tests.gpu.bench_cycle import NAME, Cycle, tmpfs
from tests.gpu.bench_figures import GIB, Measured
from tests.gpu.machine import Machine, end_helper, filesystem_for_overlays, remove
from tests.gpu.report import prepared
from tests.gpu.scenarios import ARENA

PLACES = ("/run/containerd", "/run/kybernate", "/var/lib/kybernate", "/var/log/kybernate")
WORK = Path("/var/lib/kybernate/work")
HELPER_LOG = Path("/run/kybernate/cuda.log")
HOW = ("arena", "thp")  # the way of the bytes, and the kind of pages


class WholeContainer:
    """What the coordinator asks for. A method raises whatever went wrong."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stack = ExitStack()
        for place in PLACES:
            Path(place).mkdir(parents=True, exist_ok=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0755", "none", place], check=True)

    def open(self, gib: float, kit: str, root: str, pretended: str) -> dict[str, Any]:
        """Start containerd with this side's shim, run the container until it computes, and make the first image."""
        size = int(gib * GIB)
        folder = Path(root) if root else filesystem_for_overlays()
        folder = folder.with_name(f"{folder.name}-{self._name}")
        machine = Machine.start(folder, Path(kit))
        self._stack.callback(remove, folder)
        self._stack.callback(machine.stop)
        bench = prepared(machine, argparse.Namespace(mib=size >> 20, pretended=Path(pretended) if pretended else None))
        memory = self._stack.enter_context(tmpfs(bench.images / "memory", 2 * size + GIB))
        self._stack.callback(self._end)
        self._measured = Measured()
        self._cycle = Cycle(bench, memory, self._measured, f"{NAME}-{self._name}", ARENA)
        self._arena = int(size * 1.1) + 2 * GIB
        self._settings()
        self._image = memory / "image"
        began = time.monotonic()
        self._cycle.start(command=bench.payload("one"))
        started = time.monotonic() - began
        self._running = True
        self.checkpoint()
        return {"seconds": started}

    def checkpoint(self) -> dict[str, Any]:
        """Checkpoint the container, which ends it."""
        self._settings()
        self._cycle.checkpoint(*HOW, self._image)
        self._running = False
        return self._last("checkpoint")

    def restore(self) -> dict[str, Any]:
        """Restore the image, and wait until it computes; `spans` say what was done when."""
        self._settings()
        before = HELPER_LOG.stat().st_size if HELPER_LOG.exists() else 0
        began = time.time()
        self._cycle.restore(*HOW, self._image)
        self._running = True
        found = self._last("restore")
        events = _events(self._cycle.shim_log), _events(HELPER_LOG, before)
        return found | {"spans": [span._asdict() for span in self._spans(*events, began, found["seconds"])]}

    def remark(self) -> str:
        """Return nothing: an error of a node names the log."""
        return ""

    def close(self) -> None:
        """Remove the container, containerd and all that belonged to it."""
        self._stack.close()

    def _settings(self) -> None:
        self._cycle.settings("fast", HOW[1], arena=self._arena)

    def _spans(self, shim: list[Any], helper: list[Any], began: float, seconds: float) -> list[Span]:
        mine = [event for event in shim if self._cycle.id in (event.get("task"), event.get("shim"))]
        logs = sorted(WORK.glob(f"*.{self._cycle.id}.restore/restore.log"))
        criu = (logs[-1].stat().st_mtime, logs[-1].read_text(errors="replace")) if logs else None
        return spans(mine, helper, criu, began, seconds)

    def _last(self, verb: str) -> dict[str, Any]:
        key = (verb, *HOW)
        return {"seconds": self._measured.seconds[key][-1], "steps": self._measured.steps[key][-1]}

    def _end(self) -> None:
        if self._running:
            self._cycle.remove()
        end_helper()


def _events(log: Path, since: int = 0) -> list[Any]:
    if not log.exists():
        return []
    with log.open("rb") as stream:
        stream.seek(since)
        lines = stream.read().decode(errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]
