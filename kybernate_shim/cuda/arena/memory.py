"""The node's host memory for VRAM: a file of a fixed size on a tmpfs of its own, and who has which part of it.

It is a file so that it outlives the process that copies into it: what a container has given away is still there when
the CUDA helper, or one of its workers, is killed and replaced. The tmpfs is mounted over a directory that only root may
enter, with huge pages, and limited to the arena's size. Beside the memory lies a note for every process whose bytes
are in it, named by its pid and start time, so that the part of a process that has ended is free by itself.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from kybernate_shim.linux.libc import MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_REMOUNT, mount
from kybernate_shim.linux.process import is_exiting, start_time
from kybernate_shim.linux.replacing import replacing

FOLDER = Path("/run/kybernate/arena")
NOTES = 16 << 20  # what the tmpfs holds beside the memory
GRAIN = 2 << 20
FLAGS = MS_NOSUID | MS_NODEV | MS_NOEXEC


class ArenaFull(Exception):
    """The arena has not so much room; nothing was given out."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"{wanted >> 20} MiB of VRAM do not fit into the arena, {free >> 20} MiB of it are free")


class ArenaUnavailable(Exception):
    """The node's memory for it cannot be set up; the message says why."""


@dataclass(frozen=True)
class Extent:
    """A part of the arena, in bytes from its start."""

    start: int
    size: int


@dataclass(frozen=True)
class Kept:
    """Where the bytes of one block are: `index`, `address` and `size` are the block's, `extents` add up to its size."""

    index: int
    address: int
    size: int
    extents: tuple[Extent, ...]


@dataclass(frozen=True)
class Owner:
    """A process that lives, or lived: a pid alone would be somebody else's later."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Owner:
        """Describe a process that lives. Raises FileNotFoundError or ProcessLookupError."""
        return cls(pid, start_time(pid))

    @property
    def alive(self) -> bool:
        try:
            return start_time(self.pid) == self.started and not is_exiting(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return False


class Memory:
    """The arena of a node. Its methods may be used by several processes at once."""

    def __init__(self, size: int, folder: Path = FOLDER) -> None:
        """`size` in bytes; an arena that is there already with another size is grown, or used as it is."""
        self._folder = folder
        self._size = size // GRAIN * GRAIN

    @property
    def file(self) -> Path:
        return self._folder / "memory"

    @property
    def size(self) -> int:
        """The bytes that there are, which after a change of the configuration may be more than were asked for."""
        return self.file.stat().st_size

    def prepare(self) -> None:
        """Mount the tmpfs and make the file, where they are not there, or are too small. Raises ArenaUnavailable."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._folder.is_mount():
                self._mount()
            fd = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if os.fstat(fd).st_size < self._size:
                    mount("tmpfs", str(self._folder), "tmpfs", FLAGS | MS_REMOUNT, self._limit)
                    os.ftruncate(fd, self._size)
            finally:
                os.close(fd)
        except OSError as error:
            raise ArenaUnavailable(f"the arena in {self._folder} cannot be made: {error}") from error

    def _mount(self) -> None:
        """Mount it with huge pages, without them where the kernel has none for a tmpfs."""
        options = f"mode=0700,{self._limit}"
        try:
            mount("tmpfs", str(self._folder), "tmpfs", FLAGS, f"{options},huge=always")
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            mount("tmpfs", str(self._folder), "tmpfs", FLAGS, options)

    @property
    def _limit(self) -> str:
        return f"size={self._size + NOTES}"

    def free(self) -> int:
        """The bytes that nobody has, dead processes included."""
        with self._gate():
            return sum(extent.size for extent in _gaps(self._taken(), self.size))

    def preview(self, size: int) -> list[Extent]:
        """Return what `claim` would give for so many bytes now. Raises ArenaFull."""
        with self._gate():
            return self._room(size)

    def claim(self, owner: Owner, blocks: Sequence[tuple[int, int, int]]) -> list[Kept]:
        """Find room for `blocks` (index, address, size) and note that `owner` has it.

        Raises ArenaFull with nothing changed.
        """
        with self._gate():
            gaps = self._room(sum(size for _, _, size in blocks))
            kept = [Kept(*block, tuple(_cut(gaps, block[2]))) for block in blocks]
            self._write(owner, kept)
        return kept

    def share(self, owner: Owner, kept: Sequence[Kept]) -> None:
        """Let `owner` have what somebody else has as well: it stays until both have ended or given it up."""
        with self._gate():
            self._write(owner, kept)

    def hand_over(self, owner: Owner, shares: Mapping[Owner, Sequence[Kept]]) -> None:
        """Let what `owner` has here belong to others."""
        with self._gate():
            for other, kept in shares.items():
                self._write(other, kept)
            self.give_up(owner)

    def kept(self, owner: Owner) -> list[Kept]:
        """Return what `owner` has here, nothing for a process that has never been."""
        try:
            return [_kept(one) for one in json.loads(self._note(owner).read_text())]
        except FileNotFoundError:
            return []

    def give_up(self, owner: Owner) -> None:
        """Forget the owner's bytes. Idempotent."""
        self._note(owner).unlink(missing_ok=True)

    def _room(self, wanted: int) -> list[Extent]:
        """Return `wanted` free bytes, from the arena's start on: so the same part is used, and pinned, most often."""
        gaps = _gaps(self._taken(), self.size)
        if (free := sum(gap.size for gap in gaps)) < wanted:
            raise ArenaFull(wanted, free)
        return list(_cut(gaps, wanted))

    def _taken(self) -> list[Extent]:
        """Return the extents of all processes that live, and remove the notes of the others."""
        taken: list[Extent] = []
        for note in self._folder.glob("*.json"):
            owner = Owner(*map(int, note.stem.split("-")))
            if owner.alive:
                taken += [extent for one in self.kept(owner) for extent in one.extents]
            else:
                note.unlink(missing_ok=True)
        return sorted(taken, key=lambda extent: extent.start)

    def _write(self, owner: Owner, kept: Sequence[Kept]) -> None:
        with replacing(self._note(owner)) as stream:
            stream.write(json.dumps([asdict(one) for one in kept]))

    def _note(self, owner: Owner) -> Path:
        return self._folder / f"{owner.pid}-{owner.started}.json"

    @contextmanager
    def _gate(self) -> Iterator[None]:
        fd = os.open(self._folder / "gate", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _gaps(taken: Iterable[Extent], size: int) -> list[Extent]:
    """Return what lies between `taken`, which is in order, up to `size`."""
    gaps, at = [], 0
    for extent in [*taken, Extent(size, 0)]:
        if extent.start > at:
            gaps.append(Extent(at, extent.start - at))
        at = max(at, extent.start + extent.size)
    return gaps


def _cut(gaps: list[Extent], size: int) -> Iterator[Extent]:
    """Take `size` bytes from the front of `gaps`, in place."""
    while size:
        gap = gaps[0]
        part = min(gap.size, size)
        yield Extent(gap.start, part)
        gaps[:1] = [Extent(gap.start + part, gap.size - part)] if gap.size > part else []
        size -= part


def _kept(one: dict[str, object]) -> Kept:
    make: Callable[..., Kept] = Kept
    extents = one.pop("extents")
    assert isinstance(extents, list)
    return make(**one, extents=tuple(Extent(**extent) for extent in extents))
