"""How much room the images take that containers of one namespace have asked for by themselves."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kybernate.node.failure import Failure
from kybernate_shim.linux.cgroup.hierarchies import UNIFIED, directories

BLOCK: Final = 512  # bytes, of st_blocks


class QuotaReached(Failure):
    """The images of the caller's namespace, and the one that it asks for, are more than it may have: no wait helps."""


@dataclass(frozen=True)
class Quota:
    """`limit` in bytes, as it is now; `setting` is where an administrator finds it."""

    limit: Callable[[], int]
    setting: str = "self_socket.quota"

    async def require_room(self, directory: Path, prefix: str, pid: int, others: Iterable[int] = ()) -> None:
        """Raise QuotaReached unless the memory of the container of `pid` fits in addition to what is there.

        What is there are the images in `directory` whose names begin with `prefix`, and the memory of the containers of
        `others`, whose images are being written there. Memory on a GPU is not counted before: it counts with the next
        request. The caller has the directory to itself until the image is one of those.
        """

        def measured() -> tuple[int, int]:
            return taken(directory, prefix) + sum(map(memory_of, others)), memory_of(pid)

        there, more = await asyncio.to_thread(measured)
        if there + more > (limit := self.limit()):
            raise QuotaReached(
                f"images that containers have asked for take {there} bytes, and this one would take up to {more}: "
                f"{limit} are allowed",
                state="nothing was started",
                advice=f"the node's administrator removes images, or raises `{self.setting}`",
            )


def taken(directory: Path, prefix: str) -> int:
    """Return how many bytes the disk has for the images; what vanishes meanwhile takes none."""
    try:
        images = [path for path in directory.iterdir() if path.name.startswith(prefix) and not path.is_symlink()]
    except OSError:
        return 0
    return sum(_size(path) for image in images for path in (image, *image.rglob("*")))


def memory_of(pid: int) -> int:
    """Return how much memory the cgroup of a process uses, 0 where that is not counted."""
    try:
        found = directories(pid)
        files = [found[name] / file for name, file in
                 (("memory", "memory.usage_in_bytes"), (UNIFIED, "memory.current")) if name in found]  # fmt: skip
        return next((int(file.read_text()) for file in files if file.exists()), 0)
    except (OSError, ValueError):
        return 0


def _size(path: Path) -> int:
    try:
        return os.lstat(path).st_blocks * BLOCK
    except OSError:
        return 0
