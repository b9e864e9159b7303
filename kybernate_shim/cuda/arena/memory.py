"""The node's host memory for VRAM: a file of a fixed size on a tmpfs of its own, and who has which part of it.

It is a file so that it outlives the process that copies into it: what a container has given away is still there when
the CUDA helper, or one of its workers, is killed and replaced. The tmpfs is mounted over a directory that only root may
enter, with huge pages, and limited to the arena's size. Beside the memory lies a note for every process whose bytes
are in it, named by its pid and start time, so that the part of a process that has ended is free by itself:

    PID-START.json   the process has, or may have, no other bytes than these
    PID-START.copy   it has its bytes back; these are kept, oldest first to go, until somebody needs the room
    banks            which part of the memory lies on which NUMA node

A copy is worth something only with the hashes of its pieces, and with the key that they were made with. These lie in
the note, which tells nobody more than the memory beside it does. A note has the hash of a piece only while the arena
has the piece: it is dropped before the place of the piece may change, and written when the bytes are there.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kybernate_shim.config import NO_NODE, NodeSizes
from kybernate_shim.cuda.arena import banks
from kybernate_shim.cuda.arena.banks import Bank, Room
from kybernate_shim.cuda.arena.extents import Extent, Kept, Part, gaps, total
from kybernate_shim.cuda.arena.notes import Note, read, write
from kybernate_shim.cuda.arena.pieces import Fate, Plan, Seen
from kybernate_shim.linux import numa
from kybernate_shim.linux.libc import MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_REMOUNT, mount
from kybernate_shim.linux.process import is_exiting, start_time

FOLDER = Path("/run/kybernate/arena")
NOTES = 64 << 20  # what the tmpfs holds beside the memory
KEY_BYTES = 32
GRAIN = 2 << 20
FLAGS = MS_NOSUID | MS_NODEV | MS_NOEXEC


class ArenaFull(Exception):
    """The arena has not so much room; nothing was given out."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"{wanted >> 20} MiB of VRAM do not fit into the arena, {free >> 20} MiB of it are free")


class ArenaUnavailable(Exception):
    """The node's memory for it cannot be set up; the message says why."""


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


@dataclass(frozen=True)
class Update:
    """What `update` has found room for: all blocks, and the parts of each of them that have to be copied there.

    Of the blocks, `clean` bytes are there already, and `zero` bytes need not be. `kept` is true once all is copied.
    """

    kept: list[Kept]
    key: bytes
    changed: list[list[Part]]
    clean: int
    zero: int


class Memory:
    """The arena of a node. Its methods may be used by several processes at once."""

    def __init__(self, size: int | NodeSizes, folder: Path = FOLDER) -> None:
        """`size` in bytes, or by NUMA node; an arena that is there already is grown to it, or used as it is."""
        self._folder = folder
        sizes = ((NO_NODE, size),) if isinstance(size, int) else size
        self._sizes = tuple((node, bytes // GRAIN * GRAIN) for node, bytes in sizes)

    @property
    def file(self) -> Path:
        return self._folder / "memory"

    @property
    def banks(self) -> list[Bank]:
        """What there is, which after a change of the configuration may be more than was asked for."""
        found = banks.read(self._banks)
        if not found and self.file.exists():  # as it was made before there were banks
            found = [Bank(NO_NODE, Extent(0, self.file.stat().st_size))]
        return found

    @property
    def size(self) -> int:
        return banks.size_of(self.banks)

    def prepare(self, *, grow: bool = True) -> None:
        """Mount the tmpfs and make the file, where they are not there, or are too small. Raises ArenaUnavailable.

        To let it `grow` is for the worker that has mapped all of it, and is to reach all that is given out.
        """
        if self.size and not (grow and banks.missing(self.banks, self._sizes)):
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if fault := banks.fault_of(self._sizes, numa.memory_of_nodes()):
                raise ArenaUnavailable(fault)
            if not self._folder.is_mount():
                self._mount()
            with self._gate():
                if grow or not self.size:  # as somebody else may have made it
                    self._grow()
        except OSError as error:
            raise ArenaUnavailable(f"the arena in {self._folder} cannot be made: {error}") from error

    def _grow(self) -> None:
        """Add the banks that are missing; they count once all of them are made."""
        there = self.banks
        more = banks.missing(there, self._sizes)
        size = banks.size_of([*there, *more])
        fd = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            mount("tmpfs", str(self._folder), "tmpfs", FLAGS | MS_REMOUNT, f"size={size + NOTES}")
            os.ftruncate(fd, size)
            if any(bank.node != NO_NODE for bank in more):
                _bind(fd, more)
        finally:
            os.close(fd)
        banks.write(self._banks, [*there, *more])

    def _mount(self) -> None:
        """Mount it with huge pages, without them where the kernel has none for a tmpfs."""
        options = f"mode=0700,size={NOTES}"
        try:
            mount("tmpfs", str(self._folder), "tmpfs", FLAGS, f"{options},huge=always")
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            mount("tmpfs", str(self._folder), "tmpfs", FLAGS, options)

    def free(self) -> int:
        """The bytes that can be had: nobody has them, dead processes included, or has anything but a copy there."""
        with self._gate():
            return self._free(self._taken()).bytes

    def preview(self, owner: Owner, sizes: NodeSizes) -> list[Extent]:
        """Return where `update` would put bytes of `owner` now, so many near each node, as far as there is room."""
        with self._gate():
            copies = self.copies(owner).kept
            places = [extent for one in copies for extent in one.extents if not extent.is_hole]
            more = max(0, sum(size for _, size in sizes) - sum(one.size for one in copies))
            room = self._free([*self._taken(), *self._all_copies()])
            if room.bytes < more:
                room = self._free([*self._taken(), *places])
            for node, size in sizes:
                found = list(room.take(min(size, more), node))
                more -= total(found)
                places += found
            return places

    def claim(self, owner: Owner, blocks: Sequence[tuple[int, int, int]]) -> list[Kept]:
        """Find room for all of `blocks` (index, address, size), and note that `owner` has it.

        Copies of others give way, the oldest first. Raises ArenaFull with nothing changed.
        """
        return self.update(owner, blocks).kept

    def update(
        self,
        owner: Owner,
        blocks: Sequence[tuple[int, int, int]],
        seen: Sequence[Seen] | None = None,
        key: bytes = b"",
        near: Sequence[int] = (),
    ) -> Update:
        """Do as `claim` does, but only for pieces that are not zeros, and whose copies are not what `seen` hashes to.

        `key`, which `seen` was hashed with, is the one of `copies`, or a new one. Room is taken on the NUMA node that
        `near` names for each block, then on others. Whoever has copied calls `confirm`.
        """
        with self._gate():
            note = self.copies(owner)
            copies = {(one.index, one.address, one.size): one for one in note.kept} if note.key == key else {}
            looks = seen if seen is not None else [None] * len(blocks)
            plans = [Plan(block, look, copies.get(block)) for block, look in zip(blocks, looks, strict=True)]
            sizes = {fate: sum(plan.bytes[fate] for plan in plans) for fate in Fate}
            room = self._room(owner, sizes[Fate.CHANGED], [extent for plan in plans for extent in plan.stays])
            self._copy_note(owner).unlink(missing_ok=True)
            nodes = near or [NO_NODE] * len(plans)
            settled = [plan.settle(partial(room.take, near=node)) for plan, node in zip(plans, nodes, strict=True)]
            write(self._note(owner), Note([trusted for _, trusted in settled], key))
        changed = [plan.changed for plan in plans]
        return Update([kept for kept, _ in settled], key, changed, sizes[Fate.CLEAN], sizes[Fate.ZERO])

    def confirm(self, owner: Owner, update: Update) -> None:
        """Note that the bytes are there: the hashes that `update` was asked with are theirs."""
        if update.key:
            write(self._note(owner), Note(update.kept, update.key))

    def share(self, owner: Owner, kept: Sequence[Kept]) -> None:
        """Let `owner` have what somebody else has as well: it stays until both have ended or given it up."""
        with self._gate():
            write(self._note(owner), Note([replace(one, marks=b"") for one in kept]))

    def hand_over(self, owner: Owner, shares: Mapping[Owner, Sequence[Kept]]) -> None:
        """Let what `owner` has here belong to others."""
        with self._gate():
            for other, kept in shares.items():
                write(self._note(other), Note(list(kept)))
            self.give_up(owner)

    def kept(self, owner: Owner) -> list[Kept]:
        """Return what `owner` has here and nowhere else, nothing for a process that has never been."""
        return self.note(owner).kept

    def note(self, owner: Owner) -> Note:
        """Return the same, with the key of its hashes."""
        return read(self._note(owner))

    def learn(self, owner: Owner, note: Note) -> None:
        """Note hashes of what `owner` has here, which were not known."""
        write(self._note(owner), note)

    def copies(self, owner: Owner) -> Note:
        """Return what is kept here of bytes that `owner` has got back."""
        return read(self._copy_note(owner))

    def retire(self, owner: Owner) -> None:
        """Keep as a copy what `owner` has got back, or has never given away; forget it where it was not hashed.

        Idempotent.
        """
        with self._gate():
            if any(any(one.marks) for one in read(self._note(owner)).kept):
                now = time.time_ns()  # the kernel's own would be the same for all within some milliseconds
                os.utime(self._note(owner), ns=(now, now))
                self._note(owner).rename(self._copy_note(owner))
            else:
                self.give_up(owner)

    def give_up(self, owner: Owner) -> None:
        """Forget the owner's bytes. Idempotent."""
        self._note(owner).unlink(missing_ok=True)

    def _room(self, owner: Owner, wanted: int, stays: Sequence[Extent]) -> Room:
        """Return at least `wanted` free bytes, after dropping copies of others where that is needed for it."""
        taken = [*self._taken(), *stays]
        if (free := self._free(taken).bytes) < wanted:
            raise ArenaFull(wanted, free)
        notes = sorted(
            set(self._folder.glob("*.copy")) - {self._copy_note(owner)}, key=lambda note: note.stat().st_mtime_ns
        )
        copies = [(note, list(read(note).extents)) for note in notes]
        while (room := self._free([*taken, *(extent for _, copy in copies for extent in copy)])).bytes < wanted:
            copies.pop(0)[0].unlink()
        return room

    def _free(self, taken: Sequence[Extent]) -> Room:
        there = self.banks
        return Room(gaps(taken, banks.size_of(there)), there)

    def _taken(self) -> list[Extent]:
        """Return the extents that living processes have nowhere else, and remove the notes of the others."""
        for note in [*self._folder.glob("*.json"), *self._folder.glob("*.copy")]:
            if not Owner(*map(int, note.stem.split("-"))).alive:
                note.unlink(missing_ok=True)
        return [extent for note in self._folder.glob("*.json") for extent in read(note).extents]

    def _all_copies(self) -> list[Extent]:
        return [extent for note in self._folder.glob("*.copy") for extent in read(note).extents]

    @property
    def _banks(self) -> Path:
        return self._folder / "banks"

    def _note(self, owner: Owner) -> Path:
        return self._folder / f"{owner.pid}-{owner.started}.json"

    def _copy_note(self, owner: Owner) -> Path:
        return self._folder / f"{owner.pid}-{owner.started}.copy"

    @contextmanager
    def _gate(self) -> Iterator[None]:
        fd = os.open(self._folder / "gate", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _bind(fd: int, made: Sequence[Bank]) -> None:
    """Tell the kernel where the pages of new banks come from. Raises OSError."""
    with mmap.mmap(fd, 0) as pages:
        anchor = ctypes.c_char.from_buffer(pages)
        try:
            for bank in made:
                if bank.node != NO_NODE:
                    numa.prefer(ctypes.addressof(anchor) + bank.extent.start, bank.extent.size, bank.node)
        finally:
            del anchor  # or the mapping stays
