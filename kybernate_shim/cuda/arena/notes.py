"""What lies beside the arena's memory: a file for each process, with where its bytes are, and what they hash to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kybernate_shim.cuda.arena.extents import Extent, Kept
from kybernate_shim.linux.replacing import replacing


@dataclass(frozen=True)
class Note:
    """What the arena has of a process. `key` is the one of the hashes; empty where nothing was hashed."""

    kept: list[Kept]
    key: bytes = b""

    @property
    def extents(self) -> Iterator[Extent]:
        """Yield all that it names, holes included."""
        return (extent for one in self.kept for extent in one.extents)


def read(path: Path) -> Note:
    """Read a note; there is nothing in one that does not exist."""
    try:
        head, *marks = path.read_text().splitlines()
    except FileNotFoundError:
        return Note([])
    document: dict[str, Any] = json.loads(head)
    kept = [
        Kept(index, address, size, tuple(Extent(*extent) for extent in extents), bytes.fromhex(line))
        for (index, address, size, extents), line in zip(document["blocks"], marks, strict=True)
    ]
    return Note(kept, bytes.fromhex(document["key"]))


def write(path: Path, note: Note) -> None:
    """Write a note, in the place of the one before; whoever reads finds one or the other.

    A line of JSON, and one with the hashes of each block in hexadecimal: as JSON they would take longer to write.
    """
    blocks = [[one.index, one.address, one.size, [[e.start, e.size] for e in one.extents]] for one in note.kept]
    lines = [json.dumps({"key": note.key.hex(), "blocks": blocks}), *(one.marks.hex() for one in note.kept)]
    with replacing(path) as stream:
        stream.writelines(f"{line}\n" for line in lines)
