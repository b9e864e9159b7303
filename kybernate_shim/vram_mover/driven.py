"""A file of the image that the driver writes itself, in place of memory of the process that we would have to copy.

The driver's copy of the VRAM is one large mapping, which one of its threads makes and fills (measured on driver 580).
That mapping is intercepted, and made of the file instead. The file's pages are made by threads of ours meanwhile, which
takes half the time of the driver's single thread. Afterwards the file is digested, and the process gets empty memory in
its place, as a dump and a restore expect it.

Only a process's memory map shows whether it has the file: the worker that changed the map may have been killed.

The process is a tenant's, and itself claims which of its threads are the driver's. So the size of the mapping is
bounded by what the driver holds on its GPUs; and the file becomes part of the image only when no process has it any
more: a private mount, through which the process got it, becomes read-only, which the kernel refuses while anything is
open for writing there, and a lease shows what else is open. Otherwise the bytes are copied into another file, and this
one is emptied. Memory that was pinned for a device while it was mapped (io_uring, RDMA) is not detected: a later write
there makes the digest fail, which covers only the process's own bytes.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kybernate_shim.linux.mount.file_mount import FileMount
from kybernate_shim.linux.numa import processors_near
from kybernate_shim.linux.ptrace.mmap_interception import DESCRIPTOR, FLAGS, OFFSET, Asked, Call, MmapInterception
from kybernate_shim.linux.ptrace.remote_map import remote_page
from kybernate_shim.linux.ptrace.seized import MADV_DONTFORK, MAP_ANONYMOUS, MAP_PRIVATE, MAP_SHARED, SeizedProcess
from kybernate_shim.linux.ptrace.tracee import InjectionFailed
from kybernate_shim.vram_io import file_digests, files, image_pool, thread_pool
from kybernate_shim.vram_io.buffers import Buffer
from kybernate_shim.vram_io.digest import Tree
from kybernate_shim.vram_io.errors import FileFailed, NotTakenAway, RegionChanged
from kybernate_shim.vram_io.saved_regions import SavedRegion, is_mapped, mapped_files, open_files
from kybernate_shim.vram_io.thread_pool import CopyOptions, Piece
from kybernate_shim.vram_mover import target
from kybernate_shim.vram_mover.regions import SMALLEST_BYTES
from kybernate_shim.vram_mover.save import store

COPY = "-copy"  # in the name of a file that is removed with the others if the copy is not completed


@dataclass
class Driven:
    """The driver's file of one process: offered while the interception runs, until `settle` finds its `region`."""

    pid: int
    file: files.RoomyFile
    mount: FileMount  # through which the process has it
    theirs: int  # its descriptor in the process
    catch: MmapInterception
    region: SavedRegion | None = None  # not digested

    @property
    def size(self) -> int:
        return self.region.size if self.region is not None else 0


class MemoryAllowance:
    """The bytes that the processes of one checkpoint may take of the image's memory, together.

    `vram_bytes` is what they hold on their GPUs according to the driver; the driver's copy was never seen to be larger,
    and MARGIN is for what the driver's figure may leave out. Without a figure, 0, the machine's memory is the limit.
    """

    MARGIN_SHARE = 8  # one of so many
    MARGIN_BYTES = 256 << 20

    def __init__(self, vram_bytes: int) -> None:
        machine = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
        self._left = vram_bytes + vram_bytes // self.MARGIN_SHARE + self.MARGIN_BYTES if vram_bytes else machine
        self._lock = threading.Lock()

    def take(self, size: int) -> bool:
        """Take so many bytes, if there are as many left; return whether."""
        with self._lock:
            granted = size <= self._left
            self._left -= size if granted else 0
        return granted


@dataclass
class _Offer:
    """The plan that large memory is a shared mapping of the file: what the driver writes there is in the file then."""

    file: files.RoomyFile
    theirs: int
    threads: int
    allowance: MemoryAllowance
    declined: bool = False

    def change(self, asked: Asked) -> Mapping[int, int] | None:
        if self.declined or not asked.private_anonymous or asked.size < SMALLEST_BYTES:
            return None
        size = -(-asked.size // mmap.PAGESIZE) * mmap.PAGESIZE
        if not self.allowance.take(size):
            return None
        try:
            self.file.make_room(size, self.threads, processors_near(asked.tid))
        except FileFailed:
            self.declined = True  # no room: the driver gets its memory, and what it puts there is copied
            return None
        shared = asked.flags & ~(MAP_PRIVATE | MAP_ANONYMOUS) | MAP_SHARED
        return {FLAGS: shared, DESCRIPTOR: self.theirs, OFFSET: 0}

    def made(self, start: int, call: Call) -> None:
        """Do nothing: the pages are there."""


def offer(
    held: SeizedProcess, path: Path, how: CopyOptions, allowance: MemoryAllowance, expected: int = 0
) -> Driven | None:
    """Offer a new file `path` to the driver's threads, those that `held` has spared; None where that is not possible.

    The file must be on a tmpfs; it is one of the pool's, if that has one of about the `expected` bytes. `settle` has to
    follow.
    """
    with ExitStack() as undo:
        try:
            file = files.RoomyFile(path, filled=image_pool.take(how.pool, path, expected))
            undo.callback(file.remove)
            undo.callback(file.empty)
            mount = FileMount(file.fileno())
            undo.callback(mount.close)
            theirs = _lend(held, mount)
            undo.callback(_close, held, theirs)
            plan = _Offer(file, theirs, how.threads, allowance)
            catch = MmapInterception(held.spared, plan, seconds=held.seconds)
            catch.start()
        except (FileFailed, InjectionFailed, OSError):
            return None
        undo.pop_all()
        return Driven(held.pid, file, mount, theirs, catch)


def _lend(held: SeizedProcess, mount: FileMount) -> int:
    """Give the process the file, open for nothing of ours, and return the number that it has there."""
    fd = mount.open(os.O_RDWR)
    try:
        with remote_page(held) as page:
            return page.give_shareable(fd)
    finally:
        os.close(fd)


def settle(driven: Driven, held: SeizedProcess) -> None:
    """End the interception while the process is still stopped, and remove a file that the driver has not taken."""
    driven.catch.end()
    _close(held, driven.theirs)
    file = driven.file
    found = mapped_files([driven.pid], file.path.parent).get(driven.pid)
    if found is not None and found.file == file.path.name:
        driven.region = found
        with suppress(InjectionFailed):  # a child that had it would not be dumped without it
            held.call(held.abi.madvise, found.start, found.size, MADV_DONTFORK)
        return
    driven.mount.close()
    if not is_mapped([driven.pid], os.fstat(file.fileno())):
        file.empty()  # a remaining descriptor would keep the memory
    file.remove()


def take_away(driven: Driven, announce: Callable[[SavedRegion], None], how: CopyOptions) -> SavedRegion:
    """Put empty memory in the file's place in the process, and digest the file; `announce` is called before that.

    Pieces that are all zero become holes. A file that a process still has is replaced by a copy. Raises a VramError:
    the process has its bytes then, in the file's pages, whatever becomes of the file's name; or, once `announce` has
    been called, `made_private` finds out.
    """
    assert driven.region is not None
    region, file = driven.region, driven.file
    try:
        with SeizedProcess(driven.pid) as held:
            if not _still_has(driven.pid, region, file.path.parent):
                raise RegionChanged(
                    f"process {driven.pid}: the {region.size} bytes at {region.start:#x} are not all there any more"
                )
            announce(region)
            held.map_anonymous(region.start, region.size)
            held.call(held.abi.getpid)  # the kernel releases the file when the thread has left the call before
    except InjectionFailed as error:
        target.require_alive(driven.pid)
        raise NotTakenAway(f"process {driven.pid} cannot be given empty memory for its VRAM: {error}") from error
    if _is_ours_alone(driven):
        return _digested(region, file, how)
    return _copied(region, file, how)


def _is_ours_alone(driven: Driven) -> bool:
    """Return whether no process can read or write the file any more, nor open it for writing again."""
    try:
        ended = driven.mount.end_writing()
    except OSError:
        ended = False
    finally:
        driven.mount.close()
    return ended and driven.file.only_open_here()


def _digested(region: SavedRegion, file: files.RoomyFile, how: CopyOptions) -> SavedRegion:
    tree = Tree(region.size, how.piece_bytes, how.digest)
    data: list[int] = []
    view = file.view

    def add(piece: Piece[None], buffer: Buffer) -> int:
        if tree.add_unless_zero(piece.offset, view[piece.offset : piece.offset + piece.size]):
            data.append(piece.size)
        else:
            file.punch(piece.offset, piece.size)
        return piece.size

    thread_pool.run(thread_pool.pieces([(None, region.size, how.piece_bytes)]), add, how)
    return replace(region, data_bytes=sum(data), digest=tree.text())


def _copied(region: SavedRegion, file: files.RoomyFile, how: CopyOptions) -> SavedRegion:
    """Replace a file that a process still has by a copy, and free the memory of the original."""
    tree = Tree(region.size, how.piece_bytes, how.digest)
    data: list[int] = []
    path = file.path.with_stem(file.path.stem + COPY)
    try:
        with files.writing(path, region.size, how.direct, how.threads) as copy:

            def add(piece: Piece[None], buffer: Buffer) -> int:
                file.read(piece.offset, buffer.view[: piece.size])
                data.append(store(buffer, piece.offset, piece.size, copy, tree))
                return piece.size

            thread_pool.run(thread_pool.pieces([(None, region.size, how.piece_bytes)]), add, how)
        path.rename(file.path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    file.empty()
    return replace(region, data_bytes=sum(data), digest=tree.text(), copied=True)


def made_private(pid: int, region: SavedRegion, directory: Path) -> SavedRegion:
    """Undo `settle`, or `take_away` at any point: afterwards the region's memory is the process's own, and empty.

    Return the region with the digest of its file, from which it is to be filled. Can be called again after a failure.
    Raises a VramError; NotTakenAway with the process's bytes where they were.
    """
    if _still_has(pid, region, directory):
        try:
            with SeizedProcess(pid) as held:
                held.map_anonymous(region.start, region.size)
        except InjectionFailed as error:
            target.require_alive(pid)
            raise NotTakenAway(f"process {pid} cannot be given memory of its own: {error}") from error
    if region.digest:
        return region
    try:
        target.require_mapped(pid, [(region.start, region.end)])
    except RegionChanged as error:
        raise NotTakenAway(f"{error}: it has changed what its driver had mapped") from error
    found = file_digests.of_file(directory / region.file, CopyOptions().piece_bytes, CopyOptions())
    return replace(region, digest=found)


def close_files(pid: int, directory: Path) -> None:
    """Close the files of `directory` that a killed worker has left open in a process."""
    left = open_files(pid, directory)
    if not left:
        return
    try:
        with SeizedProcess(pid) as held:
            for theirs in left:
                held.call(held.abi.close, theirs)
    except InjectionFailed as error:
        target.require_alive(pid)
        raise NotTakenAway(f"process {pid} still has a file of {directory} open: {error}") from error


def _still_has(pid: int, region: SavedRegion, directory: Path) -> bool:
    """Return whether a process has the file of `region` mapped there, as before `take_away`; then none is missing."""
    has = mapped_files([pid], directory).get(pid)
    return has is not None and (has.file, has.start, has.size) == (region.file, region.start, region.size)


def _close(held: SeizedProcess, theirs: int) -> None:
    with suppress(InjectionFailed):  # a process that has ended has no descriptors
        held.call(held.abi.close, theirs)
