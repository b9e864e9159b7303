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

What the arena has is kept after a give, and a take copies only what has changed since. Between the look at a piece and
the end of its copy nobody changes it, because the program's threads are stopped and its work has drained: so the hash
is one of the bytes that were copied.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from kybernate_shim.config import NO_NODE
from kybernate_shim.cuda.arena.calls import DriverRefused
from kybernate_shim.cuda.arena.control import (
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
from kybernate_shim.cuda.arena.kernel import KernelUnavailable
from kybernate_shim.cuda.arena.memory import KEY_BYTES, ArenaFull, ArenaUnavailable, Memory, Owner
from kybernate_shim.cuda.arena.notes import Note
from kybernate_shim.cuda.arena.pieces import Seen, is_known
from kybernate_shim.cuda.arena.prefetch import Prefetch
from kybernate_shim.cuda.arena.transfer import NOTHING, Mapped, Prefetched, Transfer
from kybernate_shim.cuda.driver import Answer

BATCH = 64  # blocks handed out at a time: the program may have few descriptors left
GROUPS = 6  # of blocks that are copied one after the other: what one group had is released under the copies of the next
ANSWER_SECONDS = 20.0
CODES = {"ARENA_BUSY": 1001, "ARENA_FULL": 1002, "ARENA_FAILED": 1003, "ARENA_NO_ROOM": 1004}
OUT_OF_MEMORY = 2  # the driver's
FAILURES = (ControlFailed, ControlInvalid, ControlSilent, ArenaFull, ArenaUnavailable, DriverRefused, OSError)

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

    def warm(self, pid: int) -> Answer:
        return _answered(lambda: self._warm(pid))

    def expect(self, pid: int, gpus: Sequence[str]) -> Answer:
        return _answered(lambda: self._expect(pid, gpus))

    def take(self, pid: int) -> Answer:
        return _answered(lambda: self._take(pid))

    def prefetch(self, pid: int, gpu: str, free: int) -> Answer:
        return _answered(lambda: self._prefetch(pid, gpu, free))

    def drop(self, pid: int) -> Answer:
        return _answered(lambda: self._drop(pid))

    def give(self, pid: int) -> Answer:
        return _answered(lambda: self._give(pid))

    def settle(self, pid: int, hashing: bool = True, leaving: Collection[int] = ()) -> Answer:
        return _answered(lambda: self._settle(pid, hashing, leaving))

    def _warm(self, pid: int) -> Answer:
        """Look at one block of each of the program's cards to learn which card of ours that is."""
        copies = self._copies()
        nodes: dict[int, int] = {}  # that the program's cards are near
        with _opened(pid) as (control, pidfd):
            blocks = [block for block in control.blocks() if block.state is BlockState.HERE and not block.private]
            try:
                for device, index in {block.device: block.index for block in blocks}.items():
                    control.ask(Verb.SHARE, seconds=ANSWER_SECONDS, first=index, count=1)
                    for block in control.blocks():
                        if block.index == index and block.state is BlockState.SHARED:
                            card = copies.enter_device_of(_descriptor_of(pidfd, block))
                            nodes[device] = copies.node_near(card)
            finally:
                control.ask(Verb.CLOSE, seconds=ANSWER_SECONDS)
                control.ask(Verb.FORGET, seconds=ANSWER_SECONDS)
        sizes = tuple((nodes.get(block.device, NO_NODE), block.size) for block in blocks)
        copies.pin(self.memory.preview(Owner.of(pid), sizes))
        return Answer(bytes=sum(size for _, size in sizes))

    def _expect(self, pid: int, gpus: Sequence[str]) -> Answer:
        """Look first at what has been claimed: it may be handed over meanwhile."""
        kept = self.memory.kept(Owner.of(pid))
        copies = self._copies()
        copies.enter_named(gpus)
        copies.pin(extent for one in kept for extent in one.extents if not extent.is_hole)
        return Answer(bytes=sum(one.size for one in kept))

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

    def _take(self, pid: int) -> Answer:
        self._copies()  # or there is no arena, and nothing has to be undone
        self._drop(pid)  # of bytes that are about to change
        owner = Owner.of(pid)
        with _opened(pid) as (control, pidfd):
            for verb in (Verb.CLOSE, Verb.FORGET):  # what a worker has left that died while it got ready
                control.ask(verb, seconds=ANSWER_SECONDS)
            control.ask(Verb.SHARE, seconds=ANSWER_SECONDS, first=0, count=0)  # is any block in a thread's hands?
            wanted = [block for block in control.blocks() if block.state is BlockState.HERE and not block.private]
            if not wanted:
                return Answer()
            try:
                answer = self._copy_out(owner, control, pidfd, wanted)
            except BaseException as error:
                control.ask(Verb.FORGET, seconds=ANSWER_SECONDS)
                if any(block.state is BlockState.AWAY for block in control.blocks()):  # whatever it was: to be settled
                    raise ControlInvalid(f"a part of its memory is in the arena: {error}") from error
                self.memory.retire(owner)
                raise
            control.ask(Verb.RELEASE, seconds=ANSWER_SECONDS)
        return answer

    def _copy_out(self, owner: Owner, control: Control, pidfd: int, wanted: Sequence[Block]) -> Answer:
        """Have the arena hold what is in the blocks `wanted`, of which some may stay shared."""
        copies = self._copies()
        with ExitStack() as stack:
            blocks: list[Mapped] = []
            mappings: list[ExitStack] = []
            for batch in _batches(wanted):
                with _handed_out(control, pidfd, Verb.SHARE, BlockState.SHARED, batch) as descriptors:
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
                    copies.out(blocks[group], update.changed[group])
                    for mapping in mappings[group]:
                        mapping.close()
                    released.append(releasing.submit(_let_go, control, wanted[group]))
                for one in released:
                    one.result()
            self.memory.confirm(owner, update)
        self._left[owner.pid] = {block.card for block in blocks}
        size = sum(block.size for block in wanted)
        return Answer(bytes=size, clean_bytes=update.clean, zero_bytes=update.zero, remark=blind)

    def _give(self, pid: int, hashing: bool = True, leaving: Collection[int] = ()) -> Answer:
        owner = Owner.of(pid)
        note = self.memory.note(owner)
        with self._prefetched(owner, note) as prefetched:
            try:
                return self._bring_back(owner, note, prefetched, hashing, leaving)
            except ControlFailed as error:
                if error.code != OUT_OF_MEMORY or not prefetched.size:
                    raise
        return self._bring_back(owner, note, NOTHING, hashing, leaving)  # somebody has come: there was no room for both

    def _bring_back(
        self, owner: Owner, note: Note, prefetched: Prefetched, hashing: bool, leaving: Collection[int]
    ) -> Answer:
        kept = {one.index: one for one in note.kept}
        blind = ""
        with _opened(owner.pid) as (control, pidfd):
            away = [_place_of(block, kept) for block in control.blocks() if block.state is BlockState.AWAY]
            try:
                with ExitStack() as stack:
                    blocks: list[Mapped] = []
                    for batch in _batches(away):
                        with _handed_out(control, pidfd, Verb.REBUILD, BlockState.REBUILT, batch) as descriptors:
                            new = stack.enter_context(self._copies().mapped(descriptors, [one.size for one in batch]))
                        wanted = [list(parts(one.extents)) for one in batch]
                        gently = not self._elsewhere(leaving, {block.card for block in new})
                        self._copies().back(new, wanted, prefetched, gently=gently)
                        blocks += new
                    if hashing:
                        blind = self._learn(owner, note, away, blocks)
            except BaseException:
                control.ask(Verb.DISCARD, seconds=ANSWER_SECONDS)
                raise
            control.ask(Verb.COMMIT, seconds=ANSWER_SECONDS)
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
            self.memory.learn(
                owner, Note([replace(one, marks=marks.get(one.index, one.marks)) for one in note.kept], key)
            )
        return blind

    def _settle(self, pid: int, hashing: bool, leaving: Collection[int]) -> Answer:
        with _opened(pid) as (control, _):
            for verb in (Verb.CLOSE, Verb.FORGET, Verb.DISCARD):
                control.ask(verb, seconds=ANSWER_SECONDS)
        return self._give(pid, hashing, leaving)

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
        return Answer(CODES[name], name, str(error))


def _looked(copies: Transfer, blocks: Sequence[Mapped], key: bytes) -> tuple[list[Seen] | None, str]:
    """Hash the blocks; where that cannot be, all of them are copied, and the second value says why."""
    try:
        return copies.look(blocks, key), ""
    except (KernelUnavailable, DriverRefused) as error:
        return None, str(error)


@contextmanager
def _opened(pid: int) -> Iterator[tuple[Control, int]]:
    """Open a process's page, and a descriptor of the process. Raises ControlInvalid where it has no such page."""
    pidfd = os.pidfd_open(pid)
    try:
        control = control_of(pid)
        if control is None:
            raise ControlInvalid(f"process {pid} has not loaded the preload library")
        with control:
            yield control, pidfd
    finally:
        os.close(pidfd)


@contextmanager
def _handed_out(
    control: Control, pidfd: int, verb: Verb, state: BlockState, batch: Sequence[Block] | Sequence[Kept]
) -> Iterator[list[int]]:
    """Have the program hand out the blocks of `batch` and yield descriptors of ours for them, in its order."""
    first, last = batch[0].index, batch[-1].index
    descriptors: list[int] = []
    try:
        control.ask(verb, seconds=ANSWER_SECONDS, first=first, count=last - first + 1)
        blocks = {block.index: block for block in control.blocks() if first <= block.index <= last}
        for one in batch:
            block = blocks.get(one.index)
            if block is None or (block.address, block.size, block.state) != (one.address, one.size, state):
                raise ControlInvalid(f"block {one.index} of process {control.pid} has changed while it was moved")
            descriptors.append(take_descriptor(pidfd, block.descriptor))
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        control.ask(Verb.CLOSE, seconds=ANSWER_SECONDS)


def _descriptor_of(pidfd: int, block: Block) -> int:
    """Return a descriptor of ours for a block that its program, which runs, may have freed. Raises ControlFailed."""
    try:
        return take_descriptor(pidfd, block.descriptor)
    except OSError as error:
        if error.errno == errno.EBADF:
            raise ControlFailed(Verb.SHARE, -errno.EBUSY) from error
        raise


def _let_go(control: Control, group: Sequence[Block]) -> None:
    """Have the program release blocks of which the arena has the bytes; RELEASE does it for older libraries."""
    first, last = group[0].index, group[-1].index
    try:
        control.ask(Verb.LET_GO, seconds=ANSWER_SECONDS, first=first, count=last - first + 1)
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


def _place_of(block: Block, kept: Mapping[int, Kept]) -> Kept:
    """Return where a block's bytes are. Raises ControlInvalid where the arena has none that are like it."""
    place = kept.get(block.index)
    if place is None or (place.address, place.size) != (block.address, block.size):
        raise ControlInvalid(f"the bytes of block {block.index} are not in the arena: they are lost")
    return place
