"""From files back into a process: fill its regions, and check every byte on the way."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from kybernate_shim.linux.mount.file_mount import FileMount
from kybernate_shim.linux.ptrace.remote_map import remote_page
from kybernate_shim.linux.ptrace.seized import SeizedProcess, advise_huge_pages
from kybernate_shim.linux.ptrace.tracee import InjectionFailed
from kybernate_shim.vram_io import digest, file_digests, files, thread_pool
from kybernate_shim.vram_io.arrival import reading
from kybernate_shim.vram_io.buffers import Buffer
from kybernate_shim.vram_io.errors import VramError
from kybernate_shim.vram_io.saved_regions import SavedRegion
from kybernate_shim.vram_io.thread_pool import CopyOptions, Piece
from kybernate_shim.vram_mover import target

FULL_SHARE = 0.9


@dataclass
class _Loading:
    """A region that is being loaded."""

    region: SavedRegion
    file: files.RegionFile
    tree: digest.Tree


def load(
    pid: int,
    saved: Sequence[SavedRegion],
    directory: Path,
    how: CopyOptions | None = None,
    *,
    target_is_zero: bool = True,
    huge_pages: bool = True,
) -> None:
    """Fill the regions of process `pid` from the files in `directory`, and compare the digests.

    `target_is_zero` says that the regions read as zeros now, as after `drop` or CRIU's restore of a dropped region:
    then zeros are not written, and cost no memory. With `huge_pages`, the regions are advised to be filled with huge
    pages, which saves most of the page faults; where that is not possible nothing is lost.
    Raises a VramError among them; the process must not run then.
    """
    how = how or CopyOptions()
    target.require_mapped(pid, [(region.start, region.end) for region in saved])
    with ExitStack() as stack:
        loadings = []
        for region in saved:
            tree = digest.tree_like(region.digest, region.size)
            file = stack.enter_context(reading(directory / region.file, how))
            _require_size(file, region)
            loadings.append(_Loading(region, file, tree))
        if huge_pages:
            _advise(pid, saved)
        todo = thread_pool.pieces((loading, loading.region.size, loading.tree.piece_bytes) for loading in loadings)
        thread_pool.run(todo, lambda piece, buffer: _load_piece(pid, piece, buffer, target_is_zero), how)
        for loading in loadings:
            digest.check(loading.region.file, loading.tree.text(), loading.region.digest)


def mappable(saved: Sequence[SavedRegion], directory: Path) -> list[SavedRegion]:
    """Return the regions with mappable files without holes: reading a hole through a mapping would fill it."""
    full = [region for region in saved if region.data_bytes >= FULL_SHARE * region.size]
    return [region for region in full if files.is_mappable(directory / region.file)]


def map_in(pid: int, saved: Sequence[SavedRegion], directory: Path) -> list[SavedRegion]:
    """Map files in place of their regions, copy-on-write; return those for which that was possible.

    Nothing is copied, and the process needs no private memory for what it only reads, as the driver does. What is still
    on a disk is read by the `Proof` in parallel, and the driver follows closely: it waits where it is faster. The
    regions that are not `mappable` are left to `load`. A `Proof` has to be complete before the process runs. The
    process cannot write to the files, although it has a descriptor of each for a moment, and may be root in its
    container.
    """
    wanted = mappable(saved, directory)
    target.require_mapped(pid, [(region.start, region.end) for region in wanted])
    mapped: list[SavedRegion] = []
    with suppress(InjectionFailed, OSError), SeizedProcess(pid) as held, remote_page(held) as page:
        for region in wanted:
            with files.reading(directory / region.file, direct=False) as file, _never_writable(file) as fd:
                _require_size(file, region)
                page.map_private(fd, region.start, region.size)
            mapped.append(region)
    return mapped


@contextmanager
def _never_writable(file: files.RegionFile) -> Iterator[int]:
    """Open a file so that nothing is opened for writing by way of the descriptor. Raises OSError."""
    with FileMount(file.fileno(), read_only=True) as mount:
        fd = mount.open(os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


class Background:
    """Work that is done in a thread while other jobs are done; it ends with the process."""

    def __init__(self, work: Callable[[], None], *, name: str) -> None:
        self._work = work
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def require(self) -> None:
        """Wait for the end. Raises what the work has raised."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001  # raised again by require(), in the caller's thread
            self._failure = error


class Proof(Background):
    """Compares the digests of the files of regions in the background, while CRIU works or the driver reads them.

    It reads them through the page cache, in which the driver finds what is mapped from a disk. `require` raises a
    VramError among them; the processes must not run then.
    """

    def __init__(self, saved: Sequence[SavedRegion], directory: Path, how: CopyOptions) -> None:
        self.files = {region.file for region in saved}
        self._saved = saved
        self._directory = directory
        self._how = how
        super().__init__(self._compare_all, name="vram-proof")

    def _compare_all(self) -> None:
        for region in self._saved:
            how = replace(self._how, digest=region.digest.partition(":")[0], direct=False)
            found = file_digests.of_file(self._directory / region.file, digest.piece_bytes_of(region.digest), how)
            digest.check(region.file, found, region.digest)


def put_back(pid: int, saved: Sequence[SavedRegion], directory: Path, how: CopyOptions | None = None) -> None:
    """Fill regions, or parts of them, again. All, some or none of their pages may have been dropped.

    A cancelled operation is undone by this very function: it ignores `how.cancel`. Raises as load.
    """
    load(pid, saved, directory, replace(how or CopyOptions(), cancel=threading.Event(), on_progress=None))


def _require_size(file: files.RegionFile, region: SavedRegion) -> None:
    if file.size != region.size if region.offset is None else file.size < region.offset + region.size:
        raise VramError(f"{file.path} has {file.size} bytes, its region {region.size}")


def _advise(pid: int, saved: Sequence[SavedRegion]) -> None:
    try:
        for region in saved:
            advise_huge_pages(pid, region.start, region.size)
    except InjectionFailed:
        pass  # small pages do as well


def _load_piece(pid: int, piece: Piece[_Loading], buffer: Buffer, target_is_zero: bool) -> int:
    loading = piece.whole
    address = loading.region.start + piece.offset
    offset_in_file = (loading.region.offset or 0) + piece.offset
    if target_is_zero and not loading.file.has_data(offset_in_file, piece.size):
        loading.tree.add_zeros(piece.offset, piece.size)
        return piece.size
    loading.file.read(offset_in_file, buffer.view[: piece.size])
    loading.tree.add(piece.offset, buffer.view[: piece.size])
    for offset, size in buffer.data_runs(piece.size) if target_is_zero else [(0, piece.size)]:
        target.write_from(pid, address + offset, buffer.address + offset, size)
    loading.file.spend(offset_in_file, piece.size)
    return piece.size


class FilePrefetch:
    """Reads files of an image into the page cache in the background, while CRIU works; `load` then finds them there.

    Ends with its context, finished or not. Errors are left for `load` to find.
    """

    def __init__(self, saved: Sequence[SavedRegion], directory: Path, how: CopyOptions | None = None) -> None:
        self._paths = [directory / region.file for region in saved]
        self._how = replace(how or CopyOptions(), cancel=threading.Event(), on_progress=None)
        self._thread = threading.Thread(target=self._read_all, name="vram-prefetch")

    def __enter__(self) -> FilePrefetch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._how.cancel.set()
        self._thread.join()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all has been read; return False if that takes longer than `seconds`."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _read_all(self) -> None:
        try:
            with ExitStack() as stack:
                opened = [
                    stack.enter_context(reading(path, replace(self._how, direct=False)))
                    for path in self._paths
                    if not files.is_in_memory(path)
                ]
                todo = thread_pool.pieces((file, file.size, self._how.piece_bytes) for file in opened)
                thread_pool.run(todo, _read_piece, self._how)
        except VramError:
            pass


def _read_piece(piece: Piece[files.RegionFile], buffer: Buffer) -> int:
    if piece.whole.has_data(piece.offset, piece.size):
        piece.whole.read(piece.offset, buffer.view[: piece.size])
    return piece.size
