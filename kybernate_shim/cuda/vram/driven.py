"""A file of the image that the driver writes itself, in place of memory of the process that we would have to copy.

The driver's copy of the VRAM is one large mapping, which one of its threads makes and fills (measured on driver 580).
That mapping is caught while it is made, and made of the file. The file's pages are made by threads of ours meanwhile,
which takes half the time that the driver's one thread needs. Afterwards the file is digested, and the process gets
empty memory in its place, as a dump and a restore expect it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kybernate_shim.cuda.regions import SMALLEST_BYTES
from kybernate_shim.cuda.vram import crew, digest, files, target
from kybernate_shim.cuda.vram.buffers import Buffer
from kybernate_shim.cuda.vram.crew import Piece, Transfer
from kybernate_shim.cuda.vram.digest import Tree
from kybernate_shim.cuda.vram.errors import FileFailed, NotTakenAway, RegionChanged
from kybernate_shim.cuda.vram.saved import SavedRegion, mapped_files
from kybernate_shim.linux.mapping_catch import Caught, MappingCatch
from kybernate_shim.linux.ptrace import Held
from kybernate_shim.linux.remote_map import lending
from kybernate_shim.linux.tracee import InjectionFailed


@dataclass
class Driven:
    """The driver's file of one process: `offered` by a catch that runs, and `caught` if the driver has taken it."""

    pid: int
    file: files.RoomyFile
    theirs: int  # its descriptor in the process
    catch: MappingCatch
    caught: Caught | None = None

    @property
    def size(self) -> int:
        return _whole_pages(self.caught.size) if self.caught is not None else 0

    @property
    def undigested(self) -> SavedRegion:
        """What is known of a file that the driver has taken."""
        assert self.caught is not None
        return SavedRegion(self.file.path.name, self.caught.start, self.size, self.size, "")


def offer(held: Held, path: Path, threads: int) -> Driven | None:
    """Offer a new file `path` to the driver's threads, those that `held` has spared; None where that is not possible.

    The file must be on a tmpfs. `settle` has to follow.
    """
    try:
        file = files.RoomyFile(path)
    except FileFailed:
        return None
    theirs = -1

    def wanted(size: int) -> int | None:
        try:
            file.make_room(_whole_pages(size), threads)
        except FileFailed:
            return None  # no room: the driver gets its memory, and what it puts there is copied
        return theirs

    try:
        with lending(held) as lent:
            theirs = lent.hand_over(file.fileno())
        catch = MappingCatch(held.spared, held.abi, SMALLEST_BYTES, wanted, seconds=held.seconds)
        catch.__enter__()
    except InjectionFailed:
        if theirs >= 0:
            held.call(held.abi.close, theirs)
        file.remove()
        return None
    return Driven(held.pid, file, theirs, catch)


def settle(driven: Driven, held: Held) -> None:
    """End the catch while the process still stands, and remove a file that the driver has not taken."""
    driven.caught = driven.catch.end()
    with suppress(InjectionFailed):  # a process that has ended has no descriptors
        held.call(held.abi.close, driven.theirs)
    if driven.caught is None:
        driven.file.remove()


def take_away(driven: Driven, announce: Callable[[SavedRegion], None], how: Transfer) -> SavedRegion:
    """Digest the file, and put empty memory in its place in the process; `announce` is told before that is done.

    Pieces that are all zero become holes. Raises a VramError: the process has its bytes then, in the file's pages,
    whatever becomes of the file's name.
    """
    assert driven.caught is not None
    file, size, start = driven.file, driven.size, driven.caught.start
    tree = Tree(size, how.piece_bytes)
    data: list[int] = []
    view = file.view

    def add(piece: Piece[None], buffer: Buffer) -> int:
        if tree.add_unless_zero(piece.offset, view[piece.offset : piece.offset + piece.size]):
            data.append(piece.size)
        else:
            file.punch(piece.offset, piece.size)
        return piece.size

    crew.run(crew.pieces([(None, size, how.piece_bytes)]), add, how)
    saved = SavedRegion(file.path.name, start, size, sum(data), tree.text())
    try:
        with Held(driven.pid) as held:
            if not still_has(driven.pid, saved, file.path.parent):
                raise RegionChanged(f"process {driven.pid}: the {size} bytes at {start:#x} are not all there any more")
            announce(saved)
            held.map_anonymous(start, size)
    except InjectionFailed as error:
        target.require_alive(driven.pid)
        raise NotTakenAway(f"process {driven.pid} cannot be given empty memory for its VRAM's: {error}") from error
    return saved


def made_private(pid: int, region: SavedRegion, directory: Path) -> SavedRegion:
    """Undo `settle`, or `take_away` at any point: afterwards the region's memory is the process's own, and empty.

    Return the region with the digest of its file, from which it is to be filled. Raises a VramError, and can be
    called again then.
    """
    if still_has(pid, region, directory):
        try:
            with Held(pid) as held:
                held.map_anonymous(region.start, region.size)
                for theirs in _descriptors(pid, directory / region.file):  # of a catch that was killed
                    held.call(held.abi.close, theirs)
        except InjectionFailed as error:
            target.require_alive(pid)
            raise NotTakenAway(f"process {pid} cannot be given memory of its own: {error}") from error
    if region.digest:
        return region
    found = digest.of_file(directory / region.file, Transfer().piece_bytes, Transfer())
    return replace(region, digest=found)


def still_has(pid: int, region: SavedRegion, directory: Path) -> bool:
    """Tell whether a process has the file of `region` mapped there, as before `take_away`: then nothing is missing."""
    has = mapped_files([pid], directory).get(pid)
    return has is not None and (has.file, has.start, has.size) == (region.file, region.start, region.size)


def _descriptors(pid: int, path: Path) -> list[int]:
    wanted = path.stat()
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if os.path.samestat(fd.stat(), wanted):
                found.append(int(fd.name))
    return found


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
