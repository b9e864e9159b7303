"""Measures the restore of an image on the machine's disk against `cat` of the same bytes.

Each reads a copy of its own, with a cold cache. The order of the two changes from round to round: a virtual disk may
have a cache on the host.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.bench.page_cache import evict

IN_MEMORY = ("tmpfs", "ramfs")


def require_disk(directory: Path) -> None:
    """Raise ValueError where the files of a directory are in memory."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", directory], capture_output=True, text=True, check=True).stdout
    if kind.strip() in IN_MEMORY:
        raise ValueError(f"{directory} is on a {kind.strip()}: there is no disk to measure")


def in_turns(image: Path, disk: Path, number: int, restore: Callable[[Path], float]) -> tuple[float, float]:
    """Return the seconds of `restore` of a copy of `image` on `disk`, and of `cat` of another one."""
    require_disk(disk)
    turns = {"restore": restore, "cat": cat}
    copies = {turn: disk / f"{turn}-{number}" for turn in turns}
    for copy in copies.values():
        subprocess.run(["cp", "-a", image, copy], check=True)
    seconds = {}
    for turn in sorted(turns, reverse=bool(number % 2)):
        evict(copies[turn])
        seconds[turn] = turns[turn](copies[turn])
    for copy in copies.values():
        subprocess.run(["rm", "-rf", copy], check=True)
    return seconds["restore"], seconds["cat"]


def cat(image: Path) -> float:
    began = time.monotonic()
    subprocess.run(["cat", *sorted(image.iterdir())], stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - began
