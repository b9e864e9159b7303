"""From the process to files: copy the regions out, and drop their pages on the way.

What has been copied is dropped immediately, not at the end: so there are never two copies of everything, and the files
get pages that the process has just released, which may still be in the CPU's caches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from kybernate_shim.linux.process_memory import Region
from kybernate_shim.linux.ptrace.seized import SeizedProcess, drop_pages_of
from kybernate_shim.linux.ptrace.tracee import InjectionFailed
from kybernate_shim.vram_io import files, image_pool, sealed, thread_pool
from kybernate_shim.vram_io.buffers import Buffer
from kybernate_shim.vram_io.digest import Tree
from kybernate_shim.vram_io.errors import DataPathRefused
from kybernate_shim.vram_io.saved_regions import SavedRegion
from kybernate_shim.vram_io.thread_pool import CopyOptions, Piece
from kybernate_shim.vram_mover import target

DROP_BYTES = 64 << 20  # by one call: a call in another process costs as much as it takes to copy 1 MiB

Announce = Callable[[SavedRegion], None]


@dataclass
class _Saving:
    """A region that is being saved. `data` collects the bytes that each piece has written: appending needs no lock.

    `done` holds the offsets of pieces beyond `reached`, up to which all are saved; `dropped` is how far pages are, or
    are about to be, dropped.
    """

    region: Region
    file: files.RegionFile
    tree: Tree
    data: list[int] = field(default_factory=list)
    done: dict[int, int] = field(default_factory=dict)
    reached: int = 0
    dropped: int = 0

    def result(self) -> SavedRegion:
        region = self.region
        return SavedRegion(self.file.path.name, region.start, region.size, sum(self.data), self.tree.text())

    def part(self, start: int, end: int) -> SavedRegion:
        digest = self.tree.text_of(start, end)
        return SavedRegion(self.file.path.name, self.region.start + start, end - start, 0, digest, start)


def save(
    pid: int, regions: Sequence[Region], directory: Path, names: Sequence[str], how: CopyOptions | None = None
) -> list[SavedRegion]:
    """Copy `regions` of process `pid` into new files of `directory`, one each, named `names` in the same order.

    Blocks that are all zero become holes. The process keeps its bytes. The files are not synced: the caller that writes
    the manifest does that. Raises a VramError; the files have been removed then.
    """
    created: list[Path] = []
    try:
        return _save(pid, regions, _paths(directory, names), created, how or CopyOptions(), lambda piece: None)
    except BaseException:
        for path in created:
            path.unlink(missing_ok=True)
        raise


def move_out(
    pid: int,
    regions: Sequence[Region],
    directory: Path,
    names: Sequence[str],
    announce: Announce,
    how: CopyOptions | None = None,
) -> list[SavedRegion]:
    """Do as `save` does, and drop the pages that have been saved, so that a dump finds none.

    A thread of the process is stopped meanwhile. `announce` receives each part, in any thread, just before its pages
    are dropped: a caller that has them all can put the bytes back, by `load.put_back`, whatever becomes of us. After a
    failure that is for the caller to do, and the files stay for it. Raises a VramError, DataPathRefused where the
    kernel does not let us.
    """
    try:
        with SeizedProcess(pid) as held:
            giving = _Giving(pid, held, announce)
            return _save(pid, regions, _paths(directory, names), [], how or CopyOptions(), giving.saved)
    except InjectionFailed as error:
        target.require_alive(pid)
        raise DataPathRefused(f"process {pid} cannot be made to drop pages: {error}") from error


def _paths(directory: Path, names: Sequence[str]) -> list[Path]:
    return [directory / name for name in names]


def _save(
    pid: int,
    regions: Sequence[Region],
    paths: Sequence[Path],
    created: list[Path],
    how: CopyOptions,
    saved: Callable[[Piece[_Saving]], None],
) -> list[SavedRegion]:
    """Copy the regions, and report each piece that is in its file; `created` receives the files that were made."""
    target.require_mapped(pid, [(region.start, region.end) for region in regions])

    def work(piece: Piece[_Saving], buffer: Buffer) -> int:
        _save_piece(pid, piece, buffer)
        saved(piece)
        return piece.size

    with ExitStack() as stack:
        savings = []
        for region, path in zip(regions, paths, strict=True):
            file = stack.enter_context(create(path, region.size, how))
            created.append(path)
            savings.append(_Saving(region, file, Tree(region.size, how.piece_bytes, how.digest)))
        thread_pool.run(
            thread_pool.pieces((saving, saving.region.size, how.piece_bytes) for saving in savings), work, how
        )
        return [saving.result() for saving in savings]


def _save_piece(pid: int, piece: Piece[_Saving], buffer: Buffer) -> None:
    """Copy one piece while it is in the CPU's cache: read, look for zeros, digest, write."""
    saving = piece.whole
    target.read_into(pid, saving.region.start + piece.offset, buffer.address, piece.size)
    saving.data.append(store(buffer, piece.offset, piece.size, saving.file, saving.tree))


def create(path: Path, size: int, how: CopyOptions) -> AbstractContextManager[files.RegionFile]:
    """Open a new file of so many bytes for `store`, made of memory of the pool where there is some."""
    if how.key:
        return sealed.writing(path, size, how.key)
    filled = image_pool.take(how.pool, path, size)
    return files.writing(path, size, how.direct, how.threads, filled=filled)


def store(buffer: Buffer, offset: int, size: int, file: files.RegionFile, tree: Tree) -> int:
    """Write the first `size` bytes of a buffer to `offset` of a file, except zeros; return how many were written."""
    runs = buffer.data_runs(size)
    if runs:
        tree.add(offset, buffer.view[:size])
    else:
        tree.add_zeros(offset, size)
    reached = 0
    for start, length in runs:
        if start > reached:
            file.leave_out(offset + reached, start - reached)
        file.write(offset + start, buffer.view[start : start + length])
        reached = start + length
    if reached < size:
        file.leave_out(offset + reached, size - reached)
    return sum(length for _, length in runs)


class _Giving:
    """Drops pages as soon as those before them are saved, too. Called by all threads."""

    def __init__(self, pid: int, held: SeizedProcess, announce: Announce) -> None:
        self._pid = pid
        self._held = held
        self._announce = announce
        self._lock = threading.Lock()

    def saved(self, piece: Piece[_Saving]) -> None:
        saving = piece.whole
        with self._lock:
            saving.done[piece.offset] = piece.size
            while (size := saving.done.pop(saving.reached, 0)) > 0:
                saving.reached += size
            start, end = saving.dropped, saving.reached
            if end - start < DROP_BYTES and end < saving.region.size:
                return
            if start == end:
                return  # another thread is at it
            saving.dropped = end
        self._announce(saving.part(start, end))
        drop_pages_of(self._held, self._pid, saving.region.start + start, end - start)
