"""The node's host memory for VRAM: a file of a fixed size on a tmpfs of its own, and who has which part of it.

It is a file so that it outlives the process that copies into it: what a container has given away is still there when
the CUDA helper, or one of its workers, is killed and replaced. The tmpfs is mounted over a directory that only root may
enter, with huge pages, and limited to the arena's size. Beside the memory lies a note for every process whose bytes
are in it, named by its pid and start time, so that the part of a process that has ended is free by itself:

    PID-START.json   the process has, or may have, no other bytes than these
    PID-START.copy   it has its bytes back; these are kept, oldest first to go, until somebody needs the room
    PID-START.lock   locked by a job that reads or writes the bytes
    banks            which part of the memory lies on which NUMA node

What changes its owner is not zeroed. It is unreadable instead: room that `update` has found is pending, and only what
was copied there makes it readable, by `confirm`, block by block as a whole. So nothing that a process before has left
is ever read: not by a resume, nor for an image or a prefetch. Zeroing would cost as much as the copy, and room cannot
be given back to the kernel instead, because the cards have it pinned. Room also stays with a process that has ended,
while a job still works with it: the job of a process that hangs must not read or write what is another's by then.

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
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kybernate_shim.config import NO_NODE, NodeSizes
from kybernate_shim.cuda.arena import banks, notes
from kybernate_shim.cuda.arena.accounts import account_of
from kybernate_shim.cuda.arena.banks import Bank, Room
from kybernate_shim.cuda.arena.extents import Extent, Kept, Part, gaps, total, without_end
from kybernate_shim.cuda.arena.notes import Note, read, write
from kybernate_shim.cuda.arena.pieces import Fate, Plan, Seen
from kybernate_shim.linux import numa
from kybernate_shim.linux.libc import MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_REMOUNT, mount
from kybernate_shim.linux.private import make_directory
from kybernate_shim.linux.process import is_exiting, start_time

FOLDER = Path("/run/kybernate/arena")
NOTES = 64 << 20  # what the tmpfs holds beside the memory
KEY_BYTES = 32
GRAIN = 2 << 20
LOCK_PAUSE = 0.005  # between two looks at whether an earlier job has ended
FLAGS = MS_NOSUID | MS_NODEV | MS_NOEXEC


class ArenaFull(Exception):
    """The arena has not so much room; nothing was given out."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"{wanted >> 20} MiB of VRAM do not fit into the arena, {free >> 20} MiB of it are free")


class ShareFull(ArenaFull):
    """A pod or container would have more of the arena than its share; nothing was given out."""

    def __init__(self, wanted: int, account: str, held: int, share: int) -> None:
        Exception.__init__(
            self,
            f"{wanted >> 20} MiB of VRAM do not fit into the share of {account} in the arena, which has {held >> 20} of"
            f" {share >> 20} MiB (gpu.arena_share)",
        )


class ArenaIncomplete(Exception):
    """The arena has room for blocks of a process, and not their bytes."""

    def __init__(self, pid: int, pending: int) -> None:
        super().__init__(
            f"{pending >> 20} MiB of process {pid} were never copied to the arena: they are in its VRAM, unless it has"
            " released them; resume it before anything else is done with it"
        )


class ArenaInUse(Exception):
    """An earlier job still works with the bytes of a process."""

    def __init__(self, pid: int) -> None:
        super().__init__(f"an earlier job of the arena for process {pid} has not ended")


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

    Of the blocks, `clean` bytes are there already, and `zero` bytes need not be. `kept` is true once all is copied, and
    believed once it is confirmed.
    """

    kept: list[Kept]
    key: bytes
    changed: list[list[Part]]
    clean: int
    zero: int


class Memory:
    """The arena of a node. Its methods may be used by several processes at once."""

    def __init__(self, size: int | NodeSizes, folder: Path = FOLDER, share: float = 1.0) -> None:
        """`size` in bytes, or by NUMA node; an arena that is there already is grown to it, or used as it is.

        One pod, or container, gets at most a `share` of it from `update`.
        """
        self._folder = folder
        self._share = share
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
            make_directory(self._folder)
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

    @property
    def surplus(self) -> int:
        """The bytes that are there, and not wanted, of one node or of all: `give_back` is to make the arena again."""
        return banks.surplus(self.banks, self._sizes)

    @property
    def possible(self) -> bool:
        """Whether the machine has the nodes that are wanted, and they so much memory."""
        return not banks.fault_of(self._sizes, numa.memory_of_nodes())

    @property
    def vacant(self) -> bool:
        """Whether no process has anything but a copy there, and no job works with it."""
        with self._gate():
            return self._is_vacant()

    def give_back(self) -> bool:
        """Give all of the memory back to the machine, and tell True, if it is vacant: copies go, too.

        `prepare` makes it as it is wanted then. For the one who has mapped it, and does so no more: until then, the
        kernel keeps it.
        """
        with self._gate():
            if not self._is_vacant():
                return False
            for path in (*self._folder.glob("*.copy"), self._banks, self.file):
                path.unlink(missing_ok=True)
        return True

    def _is_vacant(self) -> bool:
        self._taken()
        return not any(self._folder.glob("*.json")) and not any(
            self._in_use(_owner_of(lock)) for lock in self._folder.glob("*.lock")
        )

    def free(self) -> int:
        """The bytes that can be had: no living process has more than a copy there.

        Of an arena that is larger than it is wanted by now, no more than that.
        """
        with self._gate():
            return self._free(self._taken()).bytes

    def preview(self, owner: Owner, sizes: NodeSizes) -> list[Extent]:
        """Return where `update` would put bytes of `owner` now, so many near each node, as far as there is room."""
        with self._gate():
            copies = self.copies(owner).kept
            places = [extent for one in copies for extent in one.extents if not extent.is_hole]
            more = max(0, min(self._limit, sum(size for _, size in sizes)) - sum(one.size for one in copies))
            room = self._free([*self._taken(), *self._all_copies()])
            if room.bytes < more:
                room = self._free([*self._taken(), *places])
            for node, size in sizes:
                found = list(room.take(min(size, more), node))
                more -= total(found)
                places += found
            return places

    def claim(self, owner: Owner, blocks: Sequence[tuple[int, int, int]]) -> Update:
        """Find room for all of `blocks` (index, address, size), and note that `owner` has it: it is pending.

        Copies of others give way, the oldest first. Raises ArenaFull with nothing changed.
        """
        return self.update(owner, blocks)

    def update(
        self,
        owner: Owner,
        blocks: Sequence[tuple[int, int, int]],
        seen: Sequence[Seen] | None = None,
        key: bytes = b"",
        near: Sequence[int] = (),
        account: str | None = None,
    ) -> Update:
        """Do as `claim` does, but only for pieces that are not zeros, and whose copies are not what `seen` hashes to.

        `key`, which `seen` was hashed with, is the one of `copies`, or a new one. Room is taken on the NUMA node that
        `near` names for each block, then on others. It counts for `account`, the owner's own if None. What has been
        copied becomes readable by `confirm`.
        """
        account = account_of(owner.pid) if account is None else account
        with self._gate():
            note = self.copies(owner)
            known = (*note.kept, *note.pending) if note.key == key else ()  # the hashes of either are true
            copies = {(one.index, one.address, one.size): one for one in known}
            looks = seen if seen is not None else [None] * len(blocks)
            plans = [Plan(block, look, copies.get(block)) for block, look in zip(blocks, looks, strict=True)]
            sizes = {fate: sum(plan.bytes[fate] for plan in plans) for fate in Fate}
            stays = [extent for plan in plans for extent in plan.stays]
            room = self._room(owner, sizes[Fate.CHANGED], stays, account)
            self._copy_note(owner).unlink(missing_ok=True)
            nodes = near or [NO_NODE] * len(plans)
            settled = [plan.settle(partial(room.take, near=node)) for plan, node in zip(plans, nodes, strict=True)]
            write(self._note(owner), Note([], key, [trusted for _, trusted in settled], account))
        changed = [plan.changed for plan in plans]
        return Update([kept for kept, _ in settled], key, changed, sizes[Fate.CLEAN], sizes[Fate.ZERO])

    def confirm(self, owner: Owner, kept: Sequence[Kept], group: slice | None = None) -> None:
        """Note that the bytes of `kept`, which `update` has returned, are there, or those of a group of its blocks.

        From then on they are the owner's, and its own place for them may be given up. Raises FileNotFoundError where
        the note is gone.
        """
        first, end, _ = (group or slice(None)).indices(len(kept))
        notes.confirm(self._note(owner), kept, first, end)

    def share(self, owner: Owner, others: Iterable[Owner]) -> dict[Owner, list[Kept]]:
        """Let `owner` have what others have as well, and return it: it stays until all have ended or given it up.

        Raises ArenaIncomplete, with nothing changed.
        """
        with self._gate():
            shared = {other: read(self._note(other)) for other in others}
            for other, note in shared.items():
                if note.pending:
                    raise ArenaIncomplete(other.pid, sum(one.size for one in note.pending))
            all_kept = [replace(one, marks=b"") for note in shared.values() for one in note.kept]
            write(self._note(owner), Note(all_kept, account=f"the checkpoint by process {owner.pid}"))
        return {other: note.kept for other, note in shared.items()}

    def hand_over(self, owner: Owner, shares: Mapping[Owner, Sequence[Kept]]) -> None:
        """Let what `owner` has here belong to others. Raises ArenaIncomplete for bytes that are not confirmed."""
        with self._gate():
            there = set(read(self._note(owner)).kept)
            for kept in shares.values():
                if missing := sum(one.size for one in kept if one not in there):
                    raise ArenaIncomplete(owner.pid, missing)
            for other, kept in shares.items():
                write(self._note(other), Note(list(kept), account=account_of(other.pid)))
            self.give_up(owner)

    def kept(self, owner: Owner) -> list[Kept]:
        """Return what `owner` has here and nowhere else, nothing for a process that has never been."""
        return self.note(owner).kept

    def note(self, owner: Owner) -> Note:
        """Return the same, with what is pending and the key of its hashes."""
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
            note = read(self._note(owner))
            if any(any(one.marks) for one in (*note.kept, *note.pending)):
                now = time.time_ns()  # the kernel's own would be the same for all within some milliseconds
                os.utime(self._note(owner), ns=(now, now))
                self._note(owner).rename(self._copy_note(owner))
            else:
                self.give_up(owner)

    @contextmanager
    def using(self, owner: Owner, seconds: float) -> Iterator[None]:
        """Read or write the bytes of `owner`, one job at a time; they stay its even if it ends meanwhile.

        Waits so many seconds for an earlier job, of whichever process. Raises ArenaInUse.
        """
        until = time.monotonic() + seconds
        fd = self._locked(owner)
        while fd < 0:
            if time.monotonic() >= until:
                raise ArenaInUse(owner.pid)
            time.sleep(LOCK_PAUSE)
            fd = self._locked(owner)
        try:
            yield
        finally:
            os.close(fd)

    def holders(self) -> dict[str, int]:
        """Return how many bytes each pod or container has, which no other can have: a copy is not counted."""
        with self._gate():
            self._taken()
            found: dict[str, int] = defaultdict(int)
            for note in self._notes():
                found[note.account] += note.room_bytes
        return {account: size for account, size in found.items() if size}

    def give_up(self, owner: Owner) -> None:
        """Forget the owner's bytes. Idempotent."""
        self._note(owner).unlink(missing_ok=True)

    @property
    def _limit(self) -> int:
        """The bytes that one pod or container may have."""
        return int(min(self.size, self._wanted) * self._share)

    @property
    def _wanted(self) -> int:
        return sum(size for _, size in self._sizes)

    def _room(self, owner: Owner, wanted: int, stays: Sequence[Extent], account: str) -> Room:
        """Return at least `wanted` free bytes, after dropping copies of others where that is needed for it."""
        taken = [*self._taken(), *stays]
        if (free := self._free(taken).bytes) < wanted:
            raise ArenaFull(wanted, free)
        copies = self._copies_by_age(owner)
        if self._share < 1:
            more = wanted + total(stays)
            held = sum(note.room_bytes for note in self._notes(but=owner) if note.account == account)
            if held + more > self._limit:
                raise ShareFull(more, account, held, self._limit)
            _make_room(copies, account, self._limit - held - more)
        while (room := self._free([*taken, *(extent for _, copy in copies for extent in copy.room)])).bytes < wanted:
            copies.pop(0)[0].unlink()
        return room

    def _copies_by_age(self, owner: Owner) -> list[tuple[Path, Note]]:
        """Return the copies of all but `owner`, the oldest first."""
        paths = set(self._folder.glob("*.copy")) - {self._copy_note(owner)}
        return [(path, read(path)) for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns)]

    def _notes(self, but: Owner | None = None) -> Iterator[Note]:
        skipped = self._note(but) if but is not None else None
        return (read(path) for path in self._folder.glob("*.json") if path != skipped)

    def _free(self, taken: Sequence[Extent]) -> Room:
        there = self.banks
        size = banks.size_of(there)
        return Room(without_end(gaps(taken, size), max(0, size - self._wanted)), there)

    def _taken(self) -> list[Extent]:
        """Return the extents that living processes have nowhere else, and remove the notes of the others."""
        for note in [path for path in self._folder.iterdir() if path.suffix in (".json", ".copy", ".lock")]:
            owner = _owner_of(note)
            if not owner.alive and not self._in_use(owner):
                note.unlink(missing_ok=True)
        return [extent for note in self._notes() for extent in note.room]

    def _all_copies(self) -> list[Extent]:
        return [extent for note in self._folder.glob("*.copy") for extent in read(note).room]

    def _in_use(self, owner: Owner) -> bool:
        """Tell whether a job still works with the bytes of a process that has ended."""
        if not self._lock(owner).exists():
            return False
        fd = self._locked(owner)
        if fd >= 0:
            os.close(fd)
        return fd < 0

    def _locked(self, owner: Owner) -> int:
        """Return a descriptor that holds the lock of `owner`, or -1."""
        fd = os.open(self._lock(owner), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:  # or it was removed since it was opened
                return fd
        except BlockingIOError:
            pass
        os.close(fd)
        return -1

    @property
    def _banks(self) -> Path:
        return self._folder / "banks"

    def _note(self, owner: Owner) -> Path:
        return self._folder / f"{owner.pid}-{owner.started}.json"

    def _copy_note(self, owner: Owner) -> Path:
        return self._folder / f"{owner.pid}-{owner.started}.copy"

    def _lock(self, owner: Owner) -> Path:
        return self._folder / f"{owner.pid}-{owner.started}.lock"

    @contextmanager
    def _gate(self) -> Iterator[None]:
        fd = os.open(self._folder / "gate", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _owner_of(note: Path) -> Owner:
    return Owner(*map(int, note.stem.split("-")))


def _make_room(copies: list[tuple[Path, Note]], account: str, most: int) -> None:
    """Drop copies of an account, the oldest first, until they have at most so many bytes."""
    own = [one for one in copies if one[1].account == account]
    size = sum(note.room_bytes for _, note in own)
    for one in own:
        if size <= most:
            return
        size -= one[1].room_bytes
        one[0].unlink()
        copies.remove(one)


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
