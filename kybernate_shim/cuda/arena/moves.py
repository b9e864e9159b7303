"""What the arena's worker does to one process whose threads are stopped and whose driver is unlocked.

    warm     make contexts and pin memory, while the program still computes
    expect   the same for programs that do not live yet, in room that somebody has claimed for them
    take     copy every block out, and have the program release it: until its release, the truth is in VRAM
    prefetch copy to the card what a give will bring there, while the driver still restores the program
    give     have the program make new memory, copy every block in, then commit: until then, it is in the arena;
             where the arena has no hashes of what it keeps, as after a restore, they are made of the new memory
    drop     forget what was prefetched: no give will come
    settle   whatever was begun and not finished, by whoever is gone: finish it towards VRAM

Where a block's bytes are is what its state says in the program's table: AWAY and REBUILT mean the arena, all else VRAM.
The table is the program's, so for the arena this is a claim: only what has been confirmed in the arena's own note is
ever given, and a group of blocks is confirmed when its bytes are there, before the program is asked to release them.
A worker that dies between two steps leaves bytes that are in VRAM, or confirmed, or both.

A job waits for its own process alone, in a thread of its own, and for no longer than the helper has given it. What it
shares with other jobs, it holds for no longer than its own calls of the driver take.

What the arena has is kept after a give, and a take copies only what has changed since. Between the look at a piece and
the end of its copy nobody changes it, because the program's threads are stopped and its work has drained: so the hash
is one of the bytes that were copied.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from kybernate_shim.config import NO_NODE
from kybernate_shim.cuda.arena.calls import DriverRefused
from kybernate_shim.cuda.arena.control import (
    MOST_BLOCKS,
    Block,
    BlockState,
    Control,
    ControlFailed,
    ControlInvalid,
    ControlSilent,
    Verb,
    control_of,
    take_descriptor,
)
from kybernate_shim.cuda.arena.extents import Kept, parts, total
from kybernate_shim.cuda.arena.jobs import Job, JobOverdue
from kybernate_shim.cuda.arena.kernel import KernelUnavailable
from kybernate_shim.cuda.arena.memory import KEY_BYTES, ArenaFull, ArenaInUse, ArenaUnavailable, Memory, Owner
from kybernate_shim.cuda.arena.notes import Note
from kybernate_shim.cuda.arena.pieces import Seen, is_known
from kybernate_shim.cuda.arena.prefetch import Prefetch
from kybernate_shim.cuda.arena.transfer import NOTHING, Mapped, Prefetched, Transfer
from kybernate_shim.cuda.driver import Answer

BATCH = 64  # blocks handed out at a time: the program may have few descriptors left
GROUPS = 6  # of blocks that are copied one after the other: what one group had is released under the copies of the next
CODES = {"ARENA_BUSY": 1001, "ARENA_FULL": 1002, "ARENA_FAILED": 1003, "ARENA_NO_ROOM": 1004, "ARENA_LIBRARY": 1005}
OUT_OF_MEMORY = 2  # the driver's
FAILURES = (
    *(ControlFailed, ControlInvalid, ControlSilent, DriverRefused, JobOverdue),
    *(ArenaFull, ArenaInUse, ArenaUnavailable, OSError),
)

T = TypeVar("T")


@dataclass
class Mover:
    """The arena and our end of the copies, which are made when the first process needs them."""

    memory: Memory
    _transfer: Transfer | None = None
    _making: threading.Lock = field(default_factory=threading.Lock)
    _prefetches: dict[Owner, Prefetch] = field(default_factory=dict)
    _left: dict[int, set[int]] = field(default_factory=dict)  # by pid, the cards that its bytes were taken from last

    @property
    def verbs(self) -> Mapping[str, Callable[..., Answer]]:
        return {
            "warm": self.warm,
            "expect": self.expect,
            "take": self.take,
            "prefetch": self.prefetch,
            "give": self.give,
            "drop": self.drop,
            "settle": self.settle,
        }

    def warm(self, pid: int, seconds: float) -> Answer:
        return _answered(lambda: self._warm(pid, Job(seconds)))

    def expect(self, pid: int, seconds: float, gpus: Sequence[str]) -> Answer:
        return _answered(lambda: self._expect(pid, gpus))

    def take(self, pid: int, seconds: float) -> Answer:
        return _answered(lambda: self._take(pid, Job(seconds)))

    def prefetch(self, pid: int, seconds: float, gpu: str, free: int) -> Answer:
        return _answered(lambda: self._prefetch(pid, gpu, free))

    def drop(self, pid: int, seconds: float) -> Answer:
        return _answered(lambda: self._drop(pid))

    def give(self, pid: int, seconds: float) -> Answer:
        return _answered(lambda: self._settle(pid, Job(seconds), True, ()))

    def settle(self, pid: int, seconds: float, hashing: bool = True, leaving: Collection[int] = ()) -> Answer:
        return _answered(lambda: self._settle(pid, Job(seconds), hashing, leaving))

    def _warm(self, pid: int, job: Job) -> Answer:
        """Look at one block of each of the program's cards to learn which card of ours that is."""
        copies = self._copies()
        nodes: dict[int, int] = {}  # that the program's cards are near
        owner = Owner.of(pid)
        with self.memory.using(owner, job.left()), _opened(owner, job) as program:
            blocks = [block for block in program.blocks() if block.state is BlockState.HERE and not block.private]
            _require_possible(pid, blocks, copies.capacity)
            try:
                for device, index in {block.device: block.index for block in blocks}.items():
                    program.ask(Verb.SHARE, first=index, count=1)
                    for block in program.blocks(index, 1):
                        if block.state is BlockState.SHARED:
                            card = copies.enter_device_of(_descriptor_of(program.pidfd, block))
                            nodes[device] = copies.node_near(card)
            finally:
                program.undo(Verb.CLOSE)
                program.undo(Verb.FORGET)
        sizes = tuple((nodes.get(block.device, NO_NODE), block.size) for block in blocks)
        copies.pin(self.memory.preview(owner, sizes))
        return Answer(bytes=sum(size for _, size in sizes))

    def _expect(self, pid: int, gpus: Sequence[str]) -> Answer:
        """Look first at what has been claimed: it may be handed over meanwhile. Nothing is read there."""
        note = self.memory.note(Owner.of(pid))
        copies = self._copies()
        copies.enter_named(gpus)
        copies.pin(extent for extent in note.room if not extent.is_hole)
        return Answer(bytes=sum(one.size for one in (*note.kept, *note.pending)))

    def _prefetch(self, pid: int, gpu: str, free: int) -> Answer:
        """Begin it; it ends with whatever comes next for the process."""
        owner = Owner.of(pid)
        self._drop(pid)
        self._prefetches[owner] = Prefetch(self._copies(), gpu, self.memory.note(owner), free)
        return Answer()

    def _drop(self, pid: int) -> Answer:
        for owner in list(self._prefetches):
            if owner.pid == pid and (prefetch := self._prefetches.pop(owner, None)):
                prefetch.close()
        return Answer()

    def _take(self, pid: int, job: Job) -> Answer:
        copies = self._copies()  # or there is no arena, and nothing has to be undone
        self._drop(pid)  # of bytes that are about to change
        owner = Owner.of(pid)
        with self.memory.using(owner, job.left()), _opened(owner, job) as program:
            for verb in (Verb.CLOSE, Verb.FORGET):  # what a worker has left that died while it got ready
                program.ask(verb)
            program.ask(Verb.SHARE, first=0, count=0)  # is any block in a thread's hands?
            blocks = program.blocks()
            if any(block.state in (BlockState.AWAY, BlockState.REBUILT) for block in blocks):
                raise ControlInvalid(f"process {pid} says that a part of its memory is in the arena already")
            wanted = [block for block in blocks if block.state is BlockState.HERE and not block.private]
            left = sum(block.size for block in blocks if block.private)
            if not wanted:
                return Answer(left_bytes=left)
            _require_possible(pid, wanted, copies.capacity)
            try:
                answer = self._copy_out(owner, program, wanted)
            except BaseException as error:
                program.undo(Verb.FORGET)
                if any(block.state is BlockState.AWAY for block in program.blocks()):  # whatever it was: to be settled
                    raise ControlInvalid(f"a part of its memory is in the arena: {error}") from error
                self.memory.retire(owner)
                raise
            program.ask(Verb.RELEASE)
        return replace(answer, left_bytes=left)

    def _copy_out(self, owner: Owner, program: _Program, wanted: Sequence[Block]) -> Answer:
        """Have the arena hold what is in the blocks `wanted`, of which some may stay shared."""
        copies = self._copies()
        with ExitStack() as stack:
            blocks: list[Mapped] = []
            mappings: list[ExitStack] = []
            for batch in _batches(wanted):
                with _handed_out(program, Verb.SHARE, BlockState.SHARED, batch) as descriptors:
                    for descriptor, block in zip(descriptors, batch, strict=True):
                        mappings.append(stack.enter_context(ExitStack()))
                        blocks += mappings[-1].enter_context(copies.mapped([descriptor], [block.size]))
            key = self.memory.copies(owner).key or os.urandom(KEY_BYTES)
            seen, blind = _looked(copies, blocks, key)
            places = [(block.index, block.address, block.size) for block in wanted]
            near = [copies.node_near(block.card) for block in blocks]
            update = self.memory.update(owner, places, seen, key if seen is not None else b"", near)
            with ThreadPoolExecutor(1) as releasing:
                released = []
                for group in _groups([block.size for block in wanted], GROUPS):
                    copies.out(blocks[group], update.changed[group], program.job.check)
                    self.memory.confirm(owner, update.kept, group)  # before the program gives its own up
                    for mapping in mappings[group]:
                        mapping.close()
                    released.append(releasing.submit(_let_go, program, wanted[group]))
                for one in released:
                    one.result()
        self._left[owner.pid] = {block.card for block in blocks}
        size = sum(block.size for block in wanted)
        return Answer(bytes=size, clean_bytes=update.clean, zero_bytes=update.zero, remark=blind)

    def _settle(self, pid: int, job: Job, hashing: bool, leaving: Collection[int]) -> Answer:
        owner = Owner.of(pid)
        with self.memory.using(owner, job.left()), _opened(owner, job) as program:
            for verb in (Verb.CLOSE, Verb.FORGET, Verb.DISCARD):
                program.ask(verb)
            note = self.memory.note(owner)
            with self._prefetched(owner, note) as prefetched:
                try:
                    return self._bring_back(owner, program, note, prefetched, hashing, leaving)
                except ControlFailed as error:
                    if error.code != OUT_OF_MEMORY or not prefetched.size:
                        raise
            # Another process has come meanwhile: there was no room for both.
            return self._bring_back(owner, program, note, NOTHING, hashing, leaving)

    def _bring_back(
        self,
        owner: Owner,
        program: _Program,
        note: Note,
        prefetched: Prefetched,
        hashing: bool,
        leaving: Collection[int],
    ) -> Answer:
        blind = ""
        away = _places((block for block in program.blocks() if block.state is BlockState.AWAY), note)
        try:
            with ExitStack() as stack:
                blocks: list[Mapped] = []
                for batch in _batches(away):
                    with _handed_out(program, Verb.REBUILD, BlockState.REBUILT, batch) as descriptors:
                        new = stack.enter_context(self._copies().mapped(descriptors, [one.size for one in batch]))
                    wanted = [list(parts(one.extents)) for one in batch]
                    gently = not self._elsewhere(leaving, {block.card for block in new})
                    self._copies().back(new, wanted, prefetched, gently=gently, check=program.job.check)
                    blocks += new
                if hashing:
                    blind = self._learn(owner, note, away, blocks)
        except BaseException:
            program.undo(Verb.DISCARD)
            raise
        program.ask(Verb.COMMIT)
        self.memory.retire(owner)
        size = sum(one.size for one in away)
        zero = size - sum(total(one.extents) for one in away)
        return Answer(bytes=size, zero_bytes=zero, prefetched_bytes=prefetched.size, remark=blind)

    def _elsewhere(self, leaving: Collection[int], cards: Collection[int]) -> bool:
        """Tell whether processes that leave have taken their bytes from other cards than these, as far as is known."""
        return all(self._left.get(pid, set(cards)).isdisjoint(cards) for pid in leaving)

    @contextmanager
    def _prefetched(self, owner: Owner, note: Note) -> Iterator[Prefetched]:
        """Yield what has been prefetched of `note`, which is dropped then."""
        prefetch = self._prefetches.get(owner)
        try:
            yield prefetch.stop() if prefetch is not None and prefetch.note == note else NOTHING
        finally:
            self._drop(owner.pid)

    def _learn(self, owner: Owner, note: Note, given: Sequence[Kept], blocks: Sequence[Mapped]) -> str:
        """Hash what was `given` and is in `blocks` now, unless that is known; return why it cannot be.

        It only spares the next take some copies, so it is done where nothing has to be compiled for it.
        """
        unknown = [(one, block) for one, block in zip(given, blocks, strict=True) if not is_known(one)]
        if not unknown or not self._copies().looks_at_once(blocks):
            return ""
        key = note.key or os.urandom(KEY_BYTES)
        seen, blind = _looked(self._copies(), [block for _, block in unknown], key)
        marks = {one.index: look.marks for (one, _), look in zip(unknown, seen or [], strict=seen is not None)}
        if marks:
            kept = [replace(one, marks=marks.get(one.index, one.marks)) for one in note.kept]
            self.memory.learn(owner, replace(note, kept=kept, key=key))
        return blind

    def _copies(self) -> Transfer:
        """Return our end, which maps the arena as it is from then on. Raises ArenaUnavailable."""
        with self._making:
            if self._transfer is None:
                try:
                    self.memory.prepare()
                except ArenaUnavailable:
                    if not self.memory.size:  # or what is there can be used, and has to be given back
                        raise
                self._transfer = Transfer(self.memory)
            return self._transfer


def _answered(work: Callable[[], Answer]) -> Answer:
    """Turn what a move raises into what the worker sends."""
    try:
        return work()
    except FAILURES as error:
        name = "ARENA_FAILED"
        if isinstance(error, ArenaFull):
            name = "ARENA_FULL"
        elif isinstance(error, ControlFailed) and error.busy:
            name = "ARENA_BUSY"
        elif isinstance(error, ControlFailed) and error.code == OUT_OF_MEMORY:
            name = "ARENA_NO_ROOM"
        elif isinstance(error, ControlSilent | ControlInvalid | JobOverdue):
            name = "ARENA_LIBRARY"  # the program's own doing, and no fault of the worker's
        return Answer(CODES[name], name, str(error))


def _looked(copies: Transfer, blocks: Sequence[Mapped], key: bytes) -> tuple[list[Seen] | None, str]:
    """Hash the blocks; where that cannot be, all of them are copied, and the second value says why."""
    try:
        return copies.look(blocks, key), ""
    except (KernelUnavailable, DriverRefused) as error:
        return None, str(error)


@dataclass(frozen=True)
class _Program:
    """A process as one job sees it: its control page, a descriptor of it, and the time that there is for it."""

    control: Control
    pidfd: int
    job: Job

    @property
    def pid(self) -> int:
        return self.control.pid

    def blocks(self, first: int = 0, count: int = MOST_BLOCKS) -> list[Block]:
        return self.control.blocks(first, count)

    def ask(self, verb: Verb, first: int = 0, count: int = MOST_BLOCKS) -> None:
        self.control.ask(verb, seconds=self.job.left(), first=first, count=count)

    def undo(self, verb: Verb) -> None:
        """Ask for what leaves the process in order, also when the job's time is over."""
        self.control.ask(verb, seconds=self.job.undo_left())


@contextmanager
def _opened(owner: Owner, job: Job) -> Iterator[_Program]:
    """Open a process's page, and a descriptor of the process. Raises ControlInvalid where it has no such page.

    Both are of `owner`, and not of a process that has got its pid: that is looked at when both are open.
    """
    pidfd = os.pidfd_open(owner.pid)
    try:
        control = control_of(owner.pid)
        if control is None:
            raise ControlInvalid(f"process {owner.pid} has not loaded the preload library")
        with control:
            if not owner.alive:
                raise ControlInvalid(f"process {owner.pid} has ended")
            yield _Program(control, pidfd, job)
    finally:
        os.close(pidfd)


@contextmanager
def _handed_out(
    program: _Program, verb: Verb, state: BlockState, batch: Sequence[Block] | Sequence[Kept]
) -> Iterator[list[int]]:
    """Have the program hand out the blocks of `batch` and yield descriptors of ours for them, in its order."""
    first, count = batch[0].index, batch[-1].index - batch[0].index + 1
    descriptors: list[int] = []
    try:
        program.ask(verb, first=first, count=count)
        blocks = {block.index: block for block in program.blocks(first, count)}
        for one in batch:
            block = blocks.get(one.index)
            if block is None or (block.address, block.size, block.state) != (one.address, one.size, state):
                raise ControlInvalid(f"block {one.index} of process {program.pid} has changed while it was moved")
            descriptors.append(take_descriptor(program.pidfd, block.descriptor))
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        program.undo(Verb.CLOSE)


def _require_possible(pid: int, blocks: Sequence[Block], capacity: int) -> None:
    """Raise ControlInvalid where the blocks are more than all cards have, before anything is done by their number."""
    if (size := sum(block.size for block in blocks)) > capacity:
        raise ControlInvalid(f"process {pid} says that it has {size >> 20} MiB of VRAM, and all cards {capacity >> 20}")


def _descriptor_of(pidfd: int, block: Block) -> int:
    """Return a descriptor of ours for a block that its program, which runs, may have freed. Raises ControlFailed."""
    try:
        return take_descriptor(pidfd, block.descriptor)
    except OSError as error:
        if error.errno == errno.EBADF:
            raise ControlFailed(Verb.SHARE, -errno.EBUSY) from error
        raise


def _let_go(program: _Program, group: Sequence[Block]) -> None:
    """Have the program release blocks of which the arena has the bytes; RELEASE does it for older libraries."""
    first, last = group[0].index, group[-1].index
    try:
        program.ask(Verb.LET_GO, first=first, count=last - first + 1)
    except ControlFailed as error:
        if error.code != -errno.EINVAL:
            raise


def _groups(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Cut what has these `sizes` into groups of about the same size, at most so many."""
    begin = size = 0
    whole = sum(sizes)
    for end, one in enumerate(sizes, 1):
        size += one
        if size * most >= whole or end == len(sizes):
            yield slice(begin, end)
            begin, size = end, 0


def _batches(blocks: Sequence[T]) -> Iterator[Sequence[T]]:
    for at in range(0, len(blocks), BATCH):
        yield blocks[at : at + BATCH]


def _places(blocks: Iterable[Block], note: Note) -> list[Kept]:
    """Return where the bytes of blocks are. Raises ControlInvalid where the arena has none that are like them."""
    kept = {(one.index, one.address, one.size): one for one in note.kept}
    pending = {(one.index, one.address, one.size) for one in note.pending}
    found = []
    for block in blocks:
        wanted = (block.index, block.address, block.size)
        if (place := kept.get(wanted)) is None:
            why = "they were never copied, and the process has released them" if wanted in pending else "they are lost"
            raise ControlInvalid(f"the bytes of block {block.index} are not in the arena: {why}")
        found.append(place)
    return found
