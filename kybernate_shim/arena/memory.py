"""The node's host memory for VRAM: a file of a fixed size on its own tmpfs, and which process has which part.

It is a file so that it outlives the process that copies into it: what a container has given away is still there when
the CUDA helper, or one of its workers, is killed and replaced. The tmpfs is mounted over a directory that only root may
enter, with huge pages, and limited to the arena's size. Next to the memory is a record for every process whose bytes
are in it, named by its pid and start time, so that the part of a process that has ended is free by itself:

    PID-START.json   the process has, or may have, no other bytes than these
    PID-START.copy   it has its bytes back; these are kept until the room is needed, the oldest are evicted first
    PID-START.lock   locked by a job that reads or writes the bytes
    PID-START.filled how many of its bytes have come from an image, in order, a line each time
    banks            which part of the memory lies on which NUMA node

What changes its owner is not zeroed. It is unreadable instead: room that `update` has found is pending, and only what
was copied there makes it readable, by `confirm`, block by block as a whole. So nothing that a process before has left
is ever read: not by a resume, nor for an image or a prefetch. What comes from an image is handed over before all of it
is there, and read as far as it is `filled`. Zeroing would cost as much as the copy, and room cannot be given back to
the kernel instead, because the GPUs have it pinned. What is `park`ed lies in a file, and its room is others'. Room also
stays with a process that has ended, while a job still
works with it: the job of a process that hangs must not read or write what is another's by then.

A copy is worth something only with the hashes of its pieces, and with the key that they were made with. These lie in
the record, which discloses no more than the memory next to it. A record has the hash of a piece only while the
arena has the piece: it is dropped before the place of the piece may change, and written when the bytes are there.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from kybernate_shim.arena import banks, records, tmpfs
from kybernate_shim.arena.accounts import account_of, drop_copies
from kybernate_shim.arena.banks import Bank, Room
from kybernate_shim.arena.errors import filler_ended, is_parked, never_copied
from kybernate_shim.arena.extents import HOLE, Extent, Kept, gaps, total, without_end
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.arena.pieces import BlockPlan, Fate, PieceHashes, Update
from kybernate_shim.arena.records import Filler, Record, read, read_number, write, write_number
from kybernate_shim.errors import Busy, NoRoom
from kybernate_shim.linux import numa
from kybernate_shim.linux.locks import held, lock_file, try_lock_file
from kybernate_shim.linux.private_files import make_directory
from kybernate_shim.run_directory import RUN
from kybernate_shim.sizes import GRAIN, NO_NODE, NodeSizes

FOLDER = RUN / "arena"
KEY_BYTES = 32


class Memory:
    """The arena of a node. Several processes may use its methods concurrently."""

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
        """Mount the tmpfs and make the file, where they are not there, or are too small. Raises OSError.

        To let it `grow` is for the worker that has mapped all of it, and is to reach all that is given out.
        """
        if self.size and not (grow and banks.missing(self.banks, self._sizes)):
            return
        try:
            make_directory(self._folder)  # also where there is no memory: processes have their locks there
            if fault := banks.fault_of(self._sizes, numa.memory_of_nodes()):
                raise OSError(fault)
            if not self._folder.is_mount():
                tmpfs.mount_folder(self._folder)
            with self._gate():
                if grow or not self.size:  # another process may have made it
                    self._grow()
        except OSError as error:
            raise OSError(f"the arena in {self._folder} cannot be created: {error}") from error

    def _grow(self) -> None:
        """Add the banks that are missing; they count once all of them are made."""
        there = self.banks
        more = banks.missing(there, self._sizes)
        tmpfs.grow(self._folder, self.file, there, more)
        banks.write(self._banks, [*there, *more])

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
        """Give all of the memory back to the machine, and return True, if it is vacant: copies go, too.

        `prepare` makes it as it is wanted then. Call it once the memory is unmapped: until then, the kernel keeps
        it.
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
            self._in_use(ArenaOwner.named(lock)) for lock in self._folder.glob("*.lock")
        )

    def free(self) -> int:
        """The free bytes of those that are wanted now: no living process has more than a copy there."""
        with self._gate():
            return self._free(self._taken()).bytes

    def preview(self, owner: ArenaOwner, sizes: NodeSizes) -> list[Extent]:
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

    def claim(self, owner: ArenaOwner, blocks: Sequence[tuple[int, int, int]]) -> Update:
        """Find room for all of `blocks` (index, address, size), and record that `owner` has it: it is pending.

        Copies of others give way, the oldest first. Raises NoRoom with nothing changed.
        """
        return self.update(owner, blocks)

    def update(
        self,
        owner: ArenaOwner,
        blocks: Sequence[tuple[int, int, int]],
        seen: Sequence[PieceHashes] | None = None,
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
            record = self.copies(owner)
            known = (*record.kept, *record.pending) if record.key == key else ()  # the hashes of either are true
            copies = {(one.index, one.address, one.size): one for one in known}
            looks = seen if seen is not None else [None] * len(blocks)
            plans = [BlockPlan(block, look, copies.get(block)) for block, look in zip(blocks, looks, strict=True)]
            sizes = {fate: sum(plan.bytes[fate] for plan in plans) for fate in Fate}
            stays = [extent for plan in plans for extent in plan.stays]
            room = self._room(owner, sizes[Fate.CHANGED], stays, account)
            self._copy_record(owner).unlink(missing_ok=True)
            self._filled(owner).unlink(missing_ok=True)
            nodes = near or [NO_NODE] * len(plans)
            settled = [plan.settle(partial(room.take, near=node)) for plan, node in zip(plans, nodes, strict=True)]
            write(self._record(owner), Record([], key, [trusted for _, trusted in settled], account))
        changed = [plan.changed for plan in plans]
        return Update([kept for kept, _ in settled], key, changed, sizes[Fate.CLEAN], sizes[Fate.ZERO])

    def confirm(self, owner: ArenaOwner, kept: Sequence[Kept], group: slice | None = None) -> None:
        """Record that the bytes of `kept`, which `update` has returned, are there, or those of a group of its blocks.

        From then on they are the owner's, and its own place for them may be given up. Raises FileNotFoundError where
        the record is gone.
        """
        first, end, _ = (group or slice(None)).indices(len(kept))
        records.confirm(self._record(owner), kept, first, end)

    def share(self, owner: ArenaOwner, others: Iterable[ArenaOwner]) -> dict[ArenaOwner, list[Kept]]:
        """Let `owner` have what others have as well, and return it: it stays until all have ended or given it up.

        Raises ArenaIncomplete, with nothing changed.
        """
        with self._gate():
            shared = {other: read(self._record(other)) for other in others}
            for other, record in shared.items():
                if record.parked:
                    raise is_parked(other.pid, record.parked)
                if record.pending:
                    raise never_copied(other.pid, sum(one.size for one in record.pending))
            all_kept = [replace(one, marks=b"") for record in shared.values() for one in record.kept]
            write(self._record(owner), Record(all_kept, account=f"the checkpoint by process {owner.pid}"))
        return {other: record.kept for other, record in shared.items()}

    def park(self, owner: ArenaOwner, directory: Path) -> None:
        """Give the owner's room to others: its bytes are in a file of `directory`, all of them, which survives us.

        Until they are handed over to it again, the owner is not brought back to its GPU. Raises ArenaIncomplete.
        """
        with self._gate():
            record = read(self._record(owner))
            if record.pending:
                raise never_copied(owner.pid, sum(one.size for one in record.pending))
            away = [replace(one, extents=(Extent(HOLE, one.size),), marks=b"") for one in record.kept]
            write(self._record(owner), Record([], pending=away, account=record.account, parked=str(directory)))

    def parked(self) -> set[str]:
        """Return the directories that have bytes of processes that live."""
        if not self._folder.is_dir():  # since the last boot
            return set()
        with self._gate():
            self._taken()
            return {record.parked for record in self._records() if record.parked}

    def hand_over(self, owner: ArenaOwner, shares: Mapping[ArenaOwner, Sequence[Kept]]) -> None:
        """Let what `owner` has here, and fills in the order of `shares`, belong to others.

        Where not all of it is confirmed, they may read as far as it is `filled`, and `owner` has the room, too, until
        it gives that up. Raises ArenaIncomplete for bytes that it has no room for.
        """
        base = 0
        with self._gate():
            record = read(self._record(owner))
            wanted = [one for kept in shares.values() for one in kept]
            if missing := sum(one.size for one in set(wanted) - {*record.kept, *record.pending}):
                raise never_copied(owner.pid, missing)
            there = set(wanted) <= set(record.kept)
            for other, kept in shares.items():
                handed = Record(list(kept), account=account_of(other.pid))
                filled = replace(handed, kept=[], pending=handed.kept, filler=Filler(owner, base))
                write(self._record(other), handed if there else filled)
                base += sum(one.size for one in kept)
            if there:
                self.give_up(owner)

    def fill(self, owner: ArenaOwner, size: int) -> None:
        """Record that the first `size` bytes of what `owner` has are there."""
        write_number(self._filled(owner), size)

    def filled(self, owner: ArenaOwner) -> int:
        """Return how many of the bytes that `owner` has are there, in order. Raises ArenaIncomplete."""
        if not owner.alive or not self._record(owner).exists():
            raise filler_ended(owner.pid)
        return read_number(self._filled(owner))

    def kept(self, owner: ArenaOwner) -> list[Kept]:
        """Return what `owner` has here and nowhere else, nothing for a process that has never been."""
        return self.record(owner).kept

    def record(self, owner: ArenaOwner) -> Record:
        """Return the same, with what is pending and the key of its hashes."""
        return read(self._record(owner))

    def learn(self, owner: ArenaOwner, record: Record) -> None:
        """Write the owner's record, with hashes that were not known, or with its blocks in this order."""
        write(self._record(owner), record)

    def copies(self, owner: ArenaOwner) -> Record:
        """Return what is kept here of bytes that `owner` has got back."""
        return read(self._copy_record(owner))

    def retire(self, owner: ArenaOwner) -> None:
        """Keep as a copy what `owner` has got back, or has never given away; forget it where it was not hashed.

        Idempotent.
        """
        with self._gate():
            record = read(self._record(owner))
            if any(any(one.marks) for one in (*record.kept, *record.pending)):
                now = time.time_ns()  # the kernel's own would be the same for all within some milliseconds
                os.utime(self._record(owner), ns=(now, now))
                self._record(owner).rename(self._copy_record(owner))
            else:
                self.give_up(owner)

    @contextmanager
    def using(self, owner: ArenaOwner, seconds: float) -> Iterator[None]:
        """Read or write the bytes of `owner`, one job at a time; they stay the owner's even if it ends meanwhile.

        Waits so many seconds for an earlier job, of whichever process. Raises Busy.
        """
        with held(try_lock_file(self._lock(owner), seconds=seconds)) as ours:
            if not ours:
                raise Busy(f"an earlier job of the arena for process {owner.pid} has not ended")
            yield

    def holders(self) -> dict[str, int]:
        """Return how many bytes each pod or container has, which no other can have: a copy is not counted."""
        with self._gate():
            self._taken()
            found: dict[str, int] = defaultdict(int)
            for record in self._records():
                found[record.account] += record.room_bytes
        return {account: size for account, size in found.items() if size}

    def give_up(self, owner: ArenaOwner) -> None:
        """Forget the owner's bytes. Idempotent."""
        self._record(owner).unlink(missing_ok=True)
        self._filled(owner).unlink(missing_ok=True)

    @property
    def _limit(self) -> int:
        """The bytes that one pod or container may have."""
        return int(min(self.size, self._wanted) * self._share)

    @property
    def _wanted(self) -> int:
        return sum(size for _, size in self._sizes)

    def _room(self, owner: ArenaOwner, wanted: int, stays: Sequence[Extent], account: str) -> Room:
        """Return at least `wanted` free bytes, after dropping copies of others where that is needed for it."""
        taken = [*self._taken(), *stays]
        if (free := self._free(taken).bytes) < wanted:
            raise NoRoom(f"{wanted >> 20} MiB of VRAM do not fit into the arena, {free >> 20} MiB of it are free")
        copies = self._copies_by_age(owner)
        if self._share < 1:
            more = wanted + total(stays)
            held = sum(record.room_bytes for record in self._records(but=owner) if record.account == account)
            if held + more > self._limit:
                raise NoRoom(
                    f"{more >> 20} MiB of VRAM do not fit into the share of {account} in the arena, which has"
                    f" {held >> 20} of {self._limit >> 20} MiB (gpu.arena_share)"
                )
            drop_copies(copies, account, self._limit - held - more)
        while (room := self._free([*taken, *(extent for _, copy in copies for extent in copy.room)])).bytes < wanted:
            copies.pop(0)[0].unlink()
        return room

    def _copies_by_age(self, owner: ArenaOwner) -> list[tuple[Path, Record]]:
        """Return the copies of all but `owner`, the oldest first."""
        paths = set(self._folder.glob("*.copy")) - {self._copy_record(owner)}
        return [(path, read(path)) for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns)]

    def _records(self, but: ArenaOwner | None = None) -> Iterator[Record]:
        skipped = self._record(but) if but is not None else None
        return (read(path) for path in self._folder.glob("*.json") if path != skipped)

    def _free(self, taken: Sequence[Extent]) -> Room:
        there = self.banks
        size = banks.size_of(there)
        return Room(without_end(gaps(taken, size), max(0, size - self._wanted)), there)

    def _taken(self) -> list[Extent]:
        """Return the extents that living processes have nowhere else, and remove the records of the others."""
        for record in [
            path for path in self._folder.iterdir() if path.suffix in (".json", ".copy", ".lock", ".filled")
        ]:
            owner = ArenaOwner.named(record)
            if not owner.alive and not self._in_use(owner):
                record.unlink(missing_ok=True)
        return [extent for record in self._records() for extent in record.room]

    def _all_copies(self) -> list[Extent]:
        return [extent for record in self._folder.glob("*.copy") for extent in read(record).room]

    def _in_use(self, owner: ArenaOwner) -> bool:
        """Return whether a job still works with the bytes of a process that has ended."""
        if not self._lock(owner).exists():
            return False
        with held(try_lock_file(self._lock(owner))) as ours:
            return not ours

    @property
    def _banks(self) -> Path:
        return self._folder / "banks"

    def _record(self, owner: ArenaOwner) -> Path:
        return self._folder / f"{owner.pid}-{owner.started}.json"

    def _copy_record(self, owner: ArenaOwner) -> Path:
        return self._folder / f"{owner.pid}-{owner.started}.copy"

    def _filled(self, owner: ArenaOwner) -> Path:
        return self._folder / f"{owner.pid}-{owner.started}.filled"

    def _lock(self, owner: ArenaOwner) -> Path:
        return self._folder / f"{owner.pid}-{owner.started}.lock"

    def _gate(self) -> AbstractContextManager[bool]:
        return held(lock_file(self._folder / "gate"))
