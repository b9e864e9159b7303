"""Claims on the memory of GPUs: without them, two restores that look for room at the same time would both find it.

The driver loses a process that it cannot place. So a restore is alone on its GPUs from its look at their free memory
until it has taken what it needs, or until a deadline. After that, others count what it has claimed as taken: they
continue in parallel where the GPU has room for both, and wait where it has not.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from kybernate_shim.gpu.helper_answers import NodeGpu
from kybernate_shim.linux.locks import held, lock_directory, lock_open, try_lock_file
from kybernate_shim.linux.private_files import FILE_MODE, make_directory
from kybernate_shim.run_directory import RUN

DIRECTORY = RUN / "claims"
ROOM = "room"  # in there: a file for each claim
ALONE_SECONDS = 10.0  # several times what a restore takes whose driver does not hang
POLL_SECONDS = 0.02
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class ClaimedRoom(NamedTuple):
    """What one claim says: bytes by the GPU's UUID, and whether their owner has seen that they are free."""

    bytes: Mapping[str, int]
    granted: bool


class Claim:
    """What a restore needs of GPUs and has not taken yet. It ends with its process, too."""

    def __init__(self, path: Path, needed: Mapping[str, int], alone: ExitStack) -> None:
        """`alone` ends what keeps others off the GPUs. Raises OSError."""
        self._path = path
        self._needed = needed
        self._alone = alone
        self._fd = os.open(path, NEW, FILE_MODE)
        lock_open(self._fd)
        self._say(granted=False)

    def grant(self) -> None:
        """Say that the GPUs have the room, and that it is about to be taken."""
        self._say(granted=True)

    def share(self) -> None:
        """Let others look for room, who count this claim as taken."""
        self._alone.close()

    def end(self) -> None:
        """End the claim: the memory is taken, or not needed any more."""
        if self._fd >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1
        self.share()

    def others(self) -> Mapping[str, int]:
        """Return what others have claimed and not taken yet, by UUID, as far as they come before this one."""
        found: Counter[str] = Counter()
        with held(lock_directory(self._path.parent)):
            for path in self._path.parent.iterdir():
                if path != self._path and (room := _read(path)) is not None and (room.granted or path < self._path):
                    found.update(room.bytes)
        return found

    def left(self, node: Iterable[NodeGpu]) -> list[NodeGpu]:
        """Return GPUs with what others leave of their free memory."""
        others = self.others()
        return [
            gpu if gpu.free_bytes is None else replace(gpu, free_bytes=max(0, gpu.free_bytes - others.get(gpu.uuid, 0)))
            for gpu in node
        ]

    def _say(self, *, granted: bool) -> None:
        if self._fd >= 0:
            os.pwrite(self._fd, json.dumps({"granted": int(granted), "bytes": dict(self._needed)}).encode(), 0)


@asynccontextmanager
async def claimed(
    needed: Mapping[str, int], *, alone_seconds: float | None = ALONE_SECONDS, directory: Path = DIRECTORY
) -> AsyncIterator[Claim]:
    """Claim so many bytes of GPUs, by UUID, and keep other restores off them, for at most `alone_seconds` if given.

    Waits for those that are alone there.
    """
    room = directory / ROOM
    make_directory(room)
    loop = asyncio.get_running_loop()
    with ExitStack() as alone:
        for uuid in sorted(needed):  # in one order everywhere, so that two never wait for each other
            while (lock := try_lock_file(directory / uuid)) is None:  # noqa: ASYNC110  # flock(2) sends no notification
                await asyncio.sleep(POLL_SECONDS)
            alone.enter_context(held(lock))
        with held(lock_directory(room)):  # so that the order of the names is that of the looks
            claim = Claim(room / f"{time.monotonic_ns():020d}-{os.getpid()}", needed, alone)
        deadline = loop.call_later(alone_seconds, claim.share) if alone_seconds is not None else None
        try:
            yield claim
        finally:
            if deadline is not None:
                deadline.cancel()
            claim.end()


def _read(path: Path) -> ClaimedRoom | None:
    """Return a claim of a directory that is locked; None where its owner has ended."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if lock_open(fd, shared=True):
            path.unlink(missing_ok=True)
            return None
        said = json.loads(os.pread(fd, os.fstat(fd).st_size, 0))
        return ClaimedRoom(said["bytes"], bool(said["granted"]))
    finally:
        os.close(fd)
