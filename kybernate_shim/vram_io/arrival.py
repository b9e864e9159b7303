"""An image that is still arriving: which blocks of its VRAM files are there, shared by the process that brings them
and those that read them.

The record is a file next to the image's, which all of them map. Its writer holds its lock (flock) as long as it lives,
so readers notice a writer that was killed. Only root can open the directory.

    offset  bytes  content (numbers: unsigned, in the machine's order: a record never leaves its node)
    0       8      "KYBARRV1"
    8       4      the number of changes, on which readers wait (futex)
    12      4      0 while it arrives, 1 when all is there, 2 when it has failed
    16      4      B: where the blocks' states begin
    20      4      bytes of the description
    24      4      which of the description's sources gives it now
    28      996    why it has failed, in UTF-8
    1024           the description: JSON, with each file's size, in the order of their blocks
    B              a byte for each 2 MiB of each file, not 0 when its bytes are there: 2 or 3 if its digest is known,
                   by XXH3-128 or BLAKE3
    L              32 bytes for each byte from B on, the digest; L is the next multiple of 32
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from kybernate_shim import bounded_json
from kybernate_shim.linux import futex
from kybernate_shim.linux.locks import lock_open
from kybernate_shim.linux.plain_files import open_plain
from kybernate_shim.vram_io import digest, files, sealed
from kybernate_shim.vram_io.errors import VramError
from kybernate_shim.vram_io.image_files import ARRIVAL

if TYPE_CHECKING:
    from kybernate_shim.vram_io.thread_pool import CopyOptions

MAGIC: Final = b"KYBARRV1"
HEAD: Final = struct.Struct("=8sIIIII996s")
CHANGES, STATE, SOURCE, REASON = 8, 12, 24, 28
REASON_BYTES: Final = 996
BLOCK: Final = 2 << 20
LEAF: Final = 32  # bytes of the longest digest
HERE: Final = 1
DIGESTED: Final = {digest.KIND: 2, digest.STRONG: 3}
ARRIVING, COMPLETE, FAILED = range(3)
LOOK: Final = 0.5  # seconds between two looks whether the writer lives


@dataclass(frozen=True)
class Description:
    """What arrives. `sources` name its origins; `patience` is the number of seconds for which nothing may arrive.

    `files` are the sizes of the files with VRAM, by their names on the disk. Where it is `transient`, the memory of
    what was read is freed, so that the image and its copy never need room twice: then it is for one restore.
    """

    files: Mapping[str, int]
    sources: Sequence[str] = ("",)
    patience: float = 120.0
    transient: bool = False


class _Record:
    """The mapped file. Words are read and written by aligned stores; only the writer changes any."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, 0)
        magic, _, _, blocks, length, _, _ = HEAD.unpack_from(self._map, 0)
        if magic != MAGIC:
            raise VramError(f"{ARRIVAL} is not a record of an arrival")
        try:
            self.description = Description(**bounded_json.parse(self._map[HEAD.size : HEAD.size + length]))
        except (ValueError, TypeError) as error:
            raise VramError(f"{ARRIVAL} is not a record of an arrival: {error}") from error
        self._first: dict[str, int] = {}
        self._blocks = number = int(blocks)
        for name, size in self.description.files.items():
            self._first[name] = number
            number += -(-size // BLOCK)
        self._end, self._leaves = number, _leaves_at(number)
        if number > len(self._map):
            raise VramError(f"{ARRIVAL} is shorter than it says")
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self._address = ctypes.addressof(self._anchor)

    @property
    def state(self) -> int:
        return self._word(STATE)

    @property
    def source(self) -> str:
        """Where it comes from: the first source, and the one that continues in its place."""
        first, now = self.description.sources[0], self.description.sources[self._word(SOURCE)]
        return first if now == first else f"{first}, then {now}"

    @property
    def bytes_here(self) -> int:
        count = self._end - self._blocks
        here = count - self._map[self._blocks : self._end].count(0)
        return min(here * BLOCK, sum(self.description.files.values()))

    def close(self) -> None:
        del self._anchor
        self._map.close()

    def _word(self, place: int) -> int:
        return int(struct.unpack_from("=I", self._map, place)[0])

    def _bytes_of(self, file: str, block: int) -> int:
        return min(BLOCK, self.description.files[file] - block * BLOCK)

    def _leaf_of(self, file: str, block: int) -> int:
        return self._leaves + LEAF * (self._first[file] + block - self._blocks)


class ArrivalWriter(_Record):
    """What the process that brings an image holds. Any thread may call it.

    `digests` are the kinds of digest of files that readers compare block by block: those of what comes in whole blocks
    are found while it is in the CPU's cache, so that nothing has to be read again for them.
    """

    def __init__(self, descriptor: int, digests: Mapping[str, str]) -> None:
        super().__init__(descriptor)
        self._digests = digests
        self._descriptor = descriptor  # its lock shows that the writer lives
        self._lock = threading.Lock()
        self._missing: dict[tuple[str, int], int] = {}  # missing bytes of blocks that are partly there

    def wrote(self, file: str, offset: int, size: int, content: memoryview | None = None) -> None:
        """Note that bytes of a file are there, each byte once; those of a file without VRAM are ignored.

        `content` are these bytes, where they are still in memory.
        """
        if file not in self._first:
            return
        whole, end = [], offset + size
        with self._lock:
            for block in range(offset // BLOCK, -(-end // BLOCK)):
                part = min(end, (block + 1) * BLOCK) - max(offset, block * BLOCK)
                left = self._missing.pop((file, block), self._bytes_of(file, block)) - part
                if left:
                    self._missing[file, block] = left
                else:
                    whole.append(block)
        for block in whole:
            begin = block * BLOCK - offset
            part_of_it = content[begin : begin + self._bytes_of(file, block)] if content and begin >= 0 else None
            self._map[self._first[file] + block] = self._digested(file, block, part_of_it)
        self._changed()

    def _digested(self, file: str, block: int, content: memoryview | None) -> int:
        """Note the digest of a block, if it can be found, and return the block's state."""
        kind = self._digests.get(file, "")
        if not content or len(content) != self._bytes_of(file, block) or kind not in DIGESTED:
            return HERE
        leaf, place = digest.leaf(kind, content), self._leaf_of(file, block)
        self._map[place : place + len(leaf)] = leaf
        return DIGESTED[kind]

    def comes_from(self, number: int) -> None:
        """Note which of the sources continues. The patience of readers begins again."""
        self._set(SOURCE, number)

    def complete(self) -> None:
        """Note that all is there."""
        self._set(STATE, COMPLETE)

    def fail(self, reason: str) -> None:
        """Note that no more will arrive, and why; the first reason counts."""
        if self.state == ARRIVING:
            text = reason.encode(errors="replace")[:REASON_BYTES]
            self._map[REASON : REASON + len(text)] = text
            self._set(STATE, FAILED)

    def close(self) -> None:
        """Close the record. Readers regard a writer as dead that has not noted its end."""
        super().close()
        os.close(self._descriptor)

    def _set(self, place: int, word: int) -> None:
        struct.pack_into("=I", self._map, place, word)
        self._changed()

    def _changed(self) -> None:
        with self._lock:
            struct.pack_into("=I", self._map, CHANGES, (self._word(CHANGES) + 1) & 0xFFFFFFFF)
        futex.wake(self._address + CHANGES)


def begin(
    directory: Path, description: Description, digests: Mapping[str, str] = MappingProxyType({})
) -> ArrivalWriter:
    """Make the record in a directory that has none; `digests` as for the writer. Raises OSError."""
    text = json.dumps(asdict(description)).encode()
    start = -(-(HEAD.size + len(text)) // mmap.PAGESIZE) * mmap.PAGESIZE
    count = sum(-(-size // BLOCK) for size in description.files.values())
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(directory / ARRIVAL, flags, 0o600)
    try:
        lock_open(descriptor, wait=True)
        os.ftruncate(descriptor, _leaves_at(start + count) + LEAF * count)
        os.pwrite(descriptor, HEAD.pack(MAGIC, 0, ARRIVING, start, len(text), 0, b"") + text, 0)
        return ArrivalWriter(descriptor, digests)
    except BaseException:
        os.close(descriptor)
        raise


def _leaves_at(end: int) -> int:
    """Return where the digests begin, behind the blocks' states, which end at `end`."""
    return -(-end // LEAF) * LEAF


class Arrival(_Record):
    """What a reader of the image has of its record. Any thread may call it."""

    def __init__(self, path: Path) -> None:
        """Raises VramError where there is no record, or none that can be read."""
        self._path = path
        try:
            descriptor = open_plain(path, flags=os.O_RDWR)
        except OSError as error:
            raise VramError(f"{path} cannot be opened: {error.strerror}") from error
        try:
            super().__init__(descriptor)
        except (ValueError, TypeError, struct.error) as error:
            raise VramError(f"{path} cannot be read: {error}") from error
        finally:
            os.close(descriptor)

    def wait(self, file: str, offset: int, size: int, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Wait until a range of a file is there. Raises VramError when `cancelled` says so."""
        if size and (first := self._first.get(file)) is not None:
            begin, end = first + offset // BLOCK, first + (offset + size - 1) // BLOCK + 1
            self._wait(lambda: self._map.find(b"\0", begin, end) < 0, file, cancelled)

    def wait_whole(self, file: str, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Wait until a file is there. Raises as `wait` does."""
        self.wait(file, 0, self.description.files.get(file, 0), cancelled)

    def wait_all(self, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Wait until all files are there. Raises as `wait` does."""
        self._wait(lambda: self.state == COMPLETE, "the rest of the image", cancelled)

    def leaf(self, file: str, offset: int, size: int, kind: str) -> bytes | None:
        """Return the digest of a range that is there; None where it is not known, or the range is not one block."""
        block, rest = divmod(offset, BLOCK)
        if rest or file not in self._first or size != self._bytes_of(file, block):
            return None
        if self._map[self._first[file] + block] != DIGESTED.get(kind):
            return None
        place = self._leaf_of(file, block)
        return self._map[place : place + digest.LEAF_BYTES[kind]]

    def _wait(self, there: Callable[[], bool], what: str, cancelled: Callable[[], bool]) -> None:
        changes, until, looked = -1, 0.0, time.monotonic()
        while True:
            seen = self._word(CHANGES)
            if there():
                return
            now = time.monotonic()
            if seen != changes:
                changes, until = seen, now + self.description.patience
            self._require_coming(what, late=now > until, look=now - looked >= LOOK)
            looked = now if now - looked >= LOOK else looked
            if cancelled():
                raise VramError(f"cancelled while {what} was awaited")
            futex.wait(self._address + CHANGES, seen, LOOK)

    def _require_coming(self, what: str, *, late: bool, look: bool) -> None:
        source, state = self.source, self.state
        if state == FAILED:
            reason = bytes(self._map[REASON : REASON + REASON_BYTES]).rstrip(b"\0").decode(errors="replace")
            raise VramError(f"{what} did not arrive from {source}: {reason}")
        if late:
            raise VramError(f"nothing has arrived from {source} for {self.description.patience:g} s; {what} is missing")
        if look and state == ARRIVING and not self._writer_lives() and self.state == ARRIVING:
            raise VramError(f"the process that brings the image from {source} has ended; {what} is missing")

    def _writer_lives(self) -> bool:
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            return not lock_open(descriptor, shared=True)
        finally:
            os.close(descriptor)


def arrival_in(directory: Path) -> Arrival | None:
    """Return the record of an image, None where all of it is there. Raises VramError where it cannot be read."""
    path = directory / ARRIVAL
    return Arrival(path) if path.exists() else None


class ArrivingFile(files.RegionFile):
    """A file whose reader waits for each part of it."""

    def __init__(self, path: Path, fd: int, arrival: Arrival, cancelled: Callable[[], bool], spent: int) -> None:
        super().__init__(path, fd)
        self._arrival, self._cancelled, self._spent = arrival, cancelled, spent

    def read(self, offset: int, into: memoryview) -> None:
        self._arrival.wait(self.path.name, offset, len(into), self._cancelled)
        super().read(offset, into)

    def has_data(self, offset: int, size: int) -> bool:
        self._arrival.wait(self.path.name, offset, min(size, self.size - offset), self._cancelled)
        return super().has_data(offset, size)

    def leaf(self, offset: int, size: int, kind: str) -> bytes | None:
        self._arrival.wait(self.path.name, offset, size, self._cancelled)
        return self._arrival.leaf(self.path.name, offset, size, kind)

    def spend(self, offset: int, size: int) -> None:
        if self._spent >= 0:
            files.punch(self._spent, offset, size)


@contextmanager
def reading(path: Path, how: CopyOptions) -> Iterator[files.RegionFile]:
    """Do as files.reading; where the image is arriving, a reader waits for what is not there yet. Raises VramError."""
    arrival = how.arrival
    if how.key:
        with sealed.reading(path, how.key) as file:
            yield file
        return
    if arrival is None:
        with files.reading(path, how.direct) as file:
            yield file
        return
    spent = open_plain(path, flags=os.O_RDWR) if arrival.description.transient else -1
    try:
        with files.reading(path, direct=False) as file:  # it is written through the cache just now
            yield ArrivingFile(path, file.fileno(), arrival, how.cancel.is_set, spent)
    finally:
        if spent >= 0:
            os.close(spent)
