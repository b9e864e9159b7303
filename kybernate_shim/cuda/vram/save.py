"""From the process to files: copy the regions out, then drop their pages, or have neither."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from kybernate_shim.cuda.vram import crew, files, target
from kybernate_shim.cuda.vram.buffers import Buffer
from kybernate_shim.cuda.vram.crew import Piece, Transfer
from kybernate_shim.cuda.vram.digest import Tree
from kybernate_shim.cuda.vram.errors import NotDropped
from kybernate_shim.cuda.vram.load import put_back
from kybernate_shim.cuda.vram.saved import SavedRegion
from kybernate_shim.linux.memory import Region
from kybernate_shim.linux.ptrace import Held, drop_pages_of
from kybernate_shim.linux.tracee import InjectionFailed


@dataclass
class _Saving:
    """A region on its way. `data` collects the bytes that each piece has written: appending needs no lock."""

    region: Region
    file: files.RegionFile
    tree: Tree
    data: list[int] = field(default_factory=list)

    def result(self) -> SavedRegion:
        region = self.region
        return SavedRegion(self.file.path.name, region.start, region.size, sum(self.data), self.tree.text())


def save(
    pid: int, regions: Sequence[Region], directory: Path, names: Sequence[str], how: Transfer | None = None
) -> list[SavedRegion]:
    """Copy `regions` of process `pid` into new files of `directory`, one each, named `names` in the same order.

    Blocks that are all zero become holes. The process keeps its bytes. The files are not synced: who writes the
    manifest does that. Raises a VramError; the files have been removed then.
    """
    how = how or Transfer()
    target.require_mapped(pid, [(region.start, region.end) for region in regions])
    paths = [directory / name for name in names]
    created: list[Path] = []
    try:
        with ExitStack() as stack:
            savings = []
            for region, path in zip(regions, paths, strict=True):
                file = stack.enter_context(files.writing(path, region.size, how.direct))
                created.append(path)
                savings.append(_Saving(region, file, Tree(region.size, how.piece_bytes)))
            todo = crew.pieces((saving, saving.region.size, how.piece_bytes) for saving in savings)
            crew.run(todo, lambda piece, buffer: _save_piece(pid, piece, buffer), how)
            return [saving.result() for saving in savings]
    except BaseException:
        for path in created:
            path.unlink(missing_ok=True)
        raise


def _save_piece(pid: int, piece: Piece[_Saving], buffer: Buffer) -> int:
    """Copy one piece while it is in the processor's cache: read, look for zeros, digest, write."""
    saving = piece.whole
    target.read_into(pid, saving.region.start + piece.offset, buffer.address, piece.size)
    runs = buffer.data_runs(piece.size)
    if runs:
        saving.tree.add(piece.offset, buffer.view[: piece.size])
    else:
        saving.tree.add_zeros(piece.offset, piece.size)
    for offset, size in runs:
        saving.file.write(piece.offset + offset, buffer.view[offset : offset + size])
    saving.data.append(sum(size for _, size in runs))
    return piece.size


def drop(
    pid: int,
    saved: Sequence[SavedRegion],
    directory: Path,
    how: Transfer | None = None,
    *,
    held: Held | None = None,
) -> None:
    """Give the pages of saved regions back to the kernel, so that a dump of the process is small.

    `held` is for a caller who keeps the process's threads stopped. Raises NotDropped when the pages cannot be dropped,
    after what had been dropped was put back; another VramError when even that failed, and the process must not go on.
    """
    target.require_mapped(pid, [(region.start, region.end) for region in saved])
    begun = 0
    try:
        with nullcontext(held) if held is not None else Held(pid) as tracer:
            for region in saved:
                begun += 1
                drop_pages_of(tracer, pid, region.start, region.size)
    except InjectionFailed as error:
        put_back(pid, saved[:begun], directory, how)
        raise NotDropped(f"{error}; process {pid} has its bytes, dump it the plain way") from error
