"""The arena's part of a checkpoint image: a file for each process, with the bytes of all its blocks in order.

For the process that moves VRAM bytes, in parallel with CRIU: `hold` before and `save` during CRIU's dump, `claim`
before and `load` during its restore. Parking works in the same way, without CRIU.
CRIU may end the process that owned the bytes, and the process that will own them does not exist yet. So in between they
belong to the process that moves them, and are freed if that process ends.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path

from kybernate_shim.arena.control import MOST_BLOCKS, MOST_BYTES
from kybernate_shim.arena.errors import ArenaIncomplete
from kybernate_shim.arena.extents import HOLE, Extent, Kept, parts
from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.arena.pieces import MARK, PIECE, PieceHashes
from kybernate_shim.errors import NoRoom
from kybernate_shim.sizes import NO_NODE
from kybernate_shim.vram_io import digest, files, thread_pool
from kybernate_shim.vram_io.arrival import reading
from kybernate_shim.vram_io.buffers import Buffer
from kybernate_shim.vram_io.errors import NotInArena, VramError
from kybernate_shim.vram_io.image_files import ArenaBlock, ArenaFile, ArenaHole
from kybernate_shim.vram_io.thread_pool import CopyOptions, Piece
from kybernate_shim.vram_mover.save import create, store

FRONT_BYTES = 64 << 20  # some 5 ms of a load from memory
LEAVES = 4  # of a digest that one thread loads before it takes the next ones: 16 threads wait for each other


def file_name(pid: int) -> str:
    """Return the name of the file for a process, `pid` as seen in the container."""
    return f"kybernate-arena-{pid}.bin"


def hold(memory: Memory, pids: Iterable[int]) -> dict[int, list[Kept]]:
    """Return what the arena has of living processes, and keep it there until `let_go`, even if they end.

    Raises FileNotFoundError and ProcessLookupError for one that is gone, and NotInArena where a part of one was never
    copied.
    """
    owners = {pid: ArenaOwner.of(pid) for pid in pids}
    try:
        held = memory.share(ArenaOwner.of(os.getpid()), owners.values())
    except ArenaIncomplete as error:
        raise NotInArena(str(error)) from error
    return {pid: held[owner] for pid, owner in owners.items()}


def let_go(memory: Memory) -> None:
    """Undo `hold`. Idempotent."""
    memory.give_up(ArenaOwner.of(os.getpid()))


def save(memory: Memory, kept: Sequence[Kept], path: Path, how: CopyOptions, *, pid: int) -> ArenaFile:
    """Copy what `hold` has found of a process, `pid` as seen in the container, into the new file `path`.

    The process must stay off its GPU meanwhile. Raises a VramError; the file has been removed then.
    """
    layout = _Layout(kept)
    written: list[int] = []
    with ExitStack() as stack:
        arena = stack.enter_context(files.reading(memory.file, direct=False))
        file = stack.enter_context(create(path, layout.size, how))
        tree = digest.Tree(layout.size, how.piece_bytes, how.digest)

        def work(piece: Piece[None], buffer: Buffer) -> int:
            for start, part in layout.parts(piece.offset, buffer.view[: piece.size]):
                if start == HOLE:
                    part[:] = bytes(len(part))
                else:
                    arena.read(start, part)
            written.append(store(buffer, piece.offset, piece.size, file, tree))
            return piece.size

        try:
            thread_pool.run(thread_pool.pieces([(None, layout.size, how.piece_bytes)]), work, how)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    blocks = tuple(ArenaBlock(one.index, one.address, one.size) for one in kept)
    return ArenaFile(pid, path.name, layout.size, sum(written), tree.text(), blocks, layout.holes)


def claim(memory: Memory, saved: Sequence[ArenaFile], near: int = NO_NODE) -> list[list[Kept]]:
    """Find room in the arena for files of an image, and return where the blocks of each are to be.

    It belongs to this process, and is on NUMA node `near` as far as there is any. Raises VramError.
    """
    for one in saved:
        _require_blocks(one)
    ours = ArenaOwner.of(os.getpid())
    blocks = [(block.index, block.address, block.size) for one in saved for block in one.blocks]
    try:
        memory.prepare(grow=False)
        seen = [look for one in saved for look in _seen(one)]
        account = f"the restore by process {ours.pid}"  # until `hand_over`
        kept = iter(memory.update(ours, blocks, seen, near=[near] * len(blocks), account=account).kept)
    except (NoRoom, OSError) as error:
        raise VramError(str(error)) from error
    return [[next(kept) for _ in one.blocks] for one in saved]


def _require_blocks(one: ArenaFile) -> None:
    """Raise VramError unless a process can have blocks of these sizes and this number."""
    indices, sizes = {block.index for block in one.blocks}, [block.size for block in one.blocks]
    if sum(sizes) != one.size or any(size % PIECE or not 0 < size <= MOST_BYTES for size in sizes):
        raise VramError(f"{one.file} does not consist of blocks")
    if one.size > MOST_BYTES or len(indices) != len(sizes) or not indices <= set(range(MOST_BLOCKS)):
        raise VramError(f"{one.file} has blocks that no process can have")


def load(
    memory: Memory, saved: Sequence[ArenaFile], shares: Sequence[Sequence[Kept]], directory: Path, how: CopyOptions
) -> None:
    """Copy files of an image to where `claim` has found room for them, and compare the digests.

    The processes to which the bytes are handed over meanwhile must not run before all have been compared. Raises a
    VramError;
    then the room is free.
    """
    ours, base = ArenaOwner.of(os.getpid()), 0
    try:
        with _writing(memory) as arena:
            for one, share in zip(saved, shares, strict=True):
                front = _Front(one.size, lambda end, base=base: memory.fill(ours, base + end))  # type: ignore[misc]
                _load(arena, one, share, directory, how, front)
                base += one.size
        memory.confirm(ours, [one for share in shares for one in share])
    except BaseException:
        memory.give_up(ours)
        raise


class _Front:
    """Tracks how many bytes of a file are there from its start on, while threads fill pieces of it in any order.

    `tell` is called with that number after each FRONT_BYTES more, and at the end.
    """

    def __init__(self, size: int, tell: Callable[[int], None]) -> None:
        self._size = size
        self._tell = tell
        self._told = self._end = 0
        self._ends: dict[int, int] = {}  # of pieces that are there, by their start
        self._lock = threading.Lock()

    def add(self, offset: int, size: int) -> None:
        with self._lock:
            self._ends[offset] = offset + size
            while (end := self._ends.pop(self._end, None)) is not None:
                self._end = end
            if self._end - self._told >= FRONT_BYTES or self._end == self._size:
                self._told = self._end
                self._tell(self._end)


def _load(
    arena: files.MappedFile,
    one: ArenaFile,
    kept: Sequence[Kept],
    directory: Path,
    how: CopyOptions,
    front: _Front,
) -> None:
    layout = _Layout(kept)
    tree = digest.tree_like(one.digest, one.size)
    with reading(directory / one.file, how) as file:
        if file.size != one.size:
            raise VramError(f"{file.path} has {file.size} bytes, its blocks {one.size}")

        def leaf(offset: int, data: memoryview) -> None:
            # Zeros are written, too, except for holes: the arena may have bytes of another process there.
            (start, _), *more = places = list(layout.parts(offset, data))
            if start != HOLE and not more and not how.key:  # as for most: then no byte is copied twice
                data, places = arena.view[start : start + len(data)], []
            file.read(offset, data)
            tree.add(offset, data)
            for start, part in places:
                if start != HOLE:
                    arena.write(start, part)
                elif bytes(part).strip(b"\0"):
                    raise VramError(f"{file.path} has data from {offset} bytes on, where it should have zeros")

        def work(piece: Piece[None], buffer: Buffer) -> int:
            end = piece.offset + piece.size
            for offset in range(piece.offset, end, tree.piece_bytes):
                leaf(offset, buffer.view[: min(tree.piece_bytes, end - offset)])
            file.spend(piece.offset, piece.size)
            front.add(piece.offset, piece.size)
            return piece.size

        thread_pool.run(thread_pool.pieces([(None, one.size, LEAVES * tree.piece_bytes)]), work, how)
    digest.check(one.file, tree.text(), one.digest)


def _seen(one: ArenaFile) -> Iterator[PieceHashes]:
    """Return for each block which pieces are not in a hole, as a look by a GPU would; there are no hashes."""
    bits = bytearray(b"\1") * (one.size // PIECE)
    for hole in one.holes:
        offset, size = hole.offset, hole.size
        if offset % PIECE or size % PIECE or not 0 <= offset <= offset + size <= one.size:
            raise VramError(f"{one.file} has a hole of {size} bytes at {offset}, which is not made of whole pieces")
        bits[offset // PIECE : (offset + size) // PIECE] = bytes(size // PIECE)
    at = 0
    for block in one.blocks:
        count = block.size // PIECE
        yield PieceHashes(bytes(count * MARK), bits[at : at + count])
        at += count


def hand_over(memory: Memory, shares: Mapping[int, Sequence[Kept]]) -> None:
    """Give what `load` fills, in the order of `shares`, to the processes with these pids, which wait for it.

    Raises FileNotFoundError and ProcessLookupError for one that is gone, and NotInArena for what `load` has given up.
    """
    try:
        memory.hand_over(ArenaOwner.of(os.getpid()), {ArenaOwner.of(pid): share for pid, share in shares.items()})
    except ArenaIncomplete as error:
        raise NotInArena(str(error)) from error


class _Layout:
    """Where in the arena the bytes of a file are."""

    def __init__(self, kept: Iterable[Kept]) -> None:
        self._extents: list[Extent] = [extent for one in kept for extent in one.extents]
        self._starts = list(accumulate((extent.size for extent in self._extents), initial=0))

    @property
    def size(self) -> int:
        return self._starts[-1]

    @property
    def holes(self) -> tuple[ArenaHole, ...]:
        return tuple(ArenaHole(part.offset, part.extent.size) for part in parts(self._extents) if part.extent.is_hole)

    def parts(self, offset: int, data: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Cut `data`, which is at `offset` of the file, and yield the pieces with where each starts in the arena.

        That is HOLE for pieces that it does not have.
        """
        index = bisect_right(self._starts, offset) - 1
        while data:
            extent, inside = self._extents[index], offset - self._starts[index]
            size = min(extent.size - inside, len(data))
            yield HOLE if extent.is_hole else extent.start + inside, data[:size]
            offset, data, index = offset + size, data[size:], index + 1


@contextmanager
def _writing(memory: Memory) -> Iterator[files.MappedFile]:
    """Open the arena so that many threads can fill it in parallel, which only a mapping allows."""
    fd = os.open(memory.file, os.O_RDWR | os.O_CLOEXEC)
    try:
        arena = files.MappedFile(memory.file, fd)
        try:
            yield arena
        finally:
            arena.close()
    finally:
        os.close(fd)
