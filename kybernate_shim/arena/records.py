"""The records next to the arena's memory: a file for each process, with where its bytes are and their hashes.

A record is written in two steps. First it names room for all blocks, which is pending: nothing may be read from there,
for it still has what its owner before has left. Then each group of blocks is confirmed, by lines at the end of the
file, as soon as all of its bytes are there. A process that dies while it writes such lines has confirmed nothing.

What is parked is in a file on a disk, and takes no room: its blocks are holes, and pending, so that nothing is read
of the arena for them.

    {"key": ..., "account": ..., "there": N, "filler": [PID, START, BASE], "parked": DIRECTORY,
     "blocks": [[index, address, size, [[start, size], ...]], ...]}
    the hashes of each block, a line in hexadecimal; the first N blocks are confirmed
    for each group that is confirmed later: the hashes of each of its blocks, and "there FIRST END"
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kybernate_shim.arena.extents import Extent, Kept, total
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.linux.atomic_write import replacing

THERE = "there "


@dataclass(frozen=True)
class Filler:
    """The process that fills the blocks of a record, one after the other; they begin at byte `base` of all it fills."""

    owner: ArenaOwner
    base: int


@dataclass(frozen=True)
class Record:
    """What the arena has of a process: the blocks `kept` there, and room for those that are `pending`.

    `key` is the one of the hashes; empty where nothing was hashed. `account` is the pod or container that is charged
    for the room. Where there is a `filler`, what is pending may be read as far as it has come (`Memory.filled`). Where
    it is `parked`, what is pending is in a file of that directory.
    """

    kept: list[Kept]
    key: bytes = b""
    pending: list[Kept] = field(default_factory=list)
    account: str = ""
    filler: Filler | None = None
    parked: str = ""

    @property
    def extents(self) -> Iterator[Extent]:
        """Yield where bytes are that may be read, holes included."""
        return (extent for one in self.kept for extent in one.extents)

    @property
    def room(self) -> Iterator[Extent]:
        """Yield all that no other process may have, holes included."""
        return (extent for one in (*self.kept, *self.pending) for extent in one.extents)

    @property
    def room_bytes(self) -> int:
        """The bytes of the arena that it takes."""
        return total(self.room)


def read(path: Path) -> Record:
    """Read a record; there is nothing in one that does not exist."""
    try:
        head, *lines = path.read_text().split("\n")[:-1]  # a line without its end was not written to its end
    except FileNotFoundError:
        return Record([])
    document: dict[str, Any] = json.loads(head)
    blocks = [
        Kept(index, address, size, tuple(Extent(*extent) for extent in extents), bytes.fromhex(line))
        for (index, address, size, extents), line in zip(document["blocks"], lines, strict=False)
    ]
    # A version that confirmed nothing wrote no "there"; it is believed, since only root could write it.
    there = set(range(document.get("there", len(blocks))))
    _confirm(blocks, there, lines[len(blocks) :])
    kept = [one for number, one in enumerate(blocks) if number in there]
    pending = [one for number, one in enumerate(blocks) if number not in there]
    filler = None
    if found := document.get("filler"):
        pid, started, base = found
        filler = Filler(ArenaOwner(pid, started), base)
    account, parked = document.get("account", ""), document.get("parked", "")
    return Record(kept, bytes.fromhex(document["key"]), pending, account, filler, parked)


def _confirm(blocks: list[Kept], there: set[int], lines: Sequence[str]) -> None:
    """Apply the confirmations in `lines` to `blocks`, and add their numbers to `there`."""
    marks: list[str] = []
    for line in lines:
        if not line.startswith(THERE):
            marks.append(line)
            continue
        first, end = map(int, line.removeprefix(THERE).split())
        for number, mark in zip(range(first, end), marks, strict=True):
            blocks[number] = replace(blocks[number], marks=bytes.fromhex(mark))
            there.add(number)
        marks = []


def write(path: Path, record: Record) -> None:
    """Write a record, in the place of the one before; a reader finds one or the other.

    A line of JSON, and one with the hashes of each block in hexadecimal: as JSON they would take longer to write.
    """
    all_blocks = [*record.kept, *record.pending]
    blocks = [[one.index, one.address, one.size, [[e.start, e.size] for e in one.extents]] for one in all_blocks]
    head: dict[str, Any] = {"key": record.key.hex(), "account": record.account, "there": len(record.kept)}
    if (filler := record.filler) is not None:
        head["filler"] = [filler.owner.pid, filler.owner.started, filler.base]
    if record.parked:
        head["parked"] = record.parked
    head["blocks"] = blocks
    lines = [json.dumps(head), *(one.marks.hex() for one in all_blocks)]
    with replacing(path) as stream:
        stream.writelines(f"{line}\n" for line in lines)


def confirm(path: Path, blocks: Sequence[Kept], first: int, end: int) -> None:
    """Record that the bytes of `blocks[first:end]` are there, with their hashes; `blocks` are all that were written.

    Raises FileNotFoundError where the record is gone.
    """
    text = "".join(f"{one.marks.hex()}\n" for one in blocks[first:end]) + f"{THERE}{first} {end}\n"
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    with os.fdopen(fd, "w") as stream:
        stream.write(text)


def write_number(path: Path, number: int) -> None:
    """Add how many bytes have come by now, as a line."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as stream:
        stream.write(f"{number}\n")


def read_number(path: Path) -> int:
    """Return the last number of `write_number`, 0 where there is none; never one of which a part was written."""
    try:
        *_, last, _ = ["0", *path.read_text().split("\n")]
    except FileNotFoundError:
        return 0
    return int(last)
