"""The node's side of the preload library's control page; preload/control.h is the other side, and says how it works.

The page is the program's own memory: what stands in it is a claim, never a fact, and may change under every look.
Numbers from it are compared with limits before anything is allocated or repeated by them. A reader of a block here
continues with what the driver says of the memory that the program hands out. Where bytes of the program are is what the
arena's own record says; a state from here decides only between places that are the program's own.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import struct
import time
from dataclasses import dataclass
from enum import IntEnum

from kybernate_shim.linux import futex
from kybernate_shim.linux.process import has_ended
from kybernate_shim.linux.process_memory import Region, read_maps
from kybernate_shim.sizes import GRAIN

NAME = "kybernate-arena"  # of the mapping, and of the thread that answers
# What the names of the driver's own threads begin with, which must keep running for its calls to be answered:
# "cuda-EvtHandlr", and such as "cuda00001400006". Other names with "cuda" are a program's, whose threads must not.
DRIVER_THREADS = ("cuda-EvtHandlr", *(f"cuda{digit}" for digit in range(10)))
MAPPED_AS = f"/memfd:{NAME} (deleted)"
MAGIC, VERSION, MOST_BLOCKS = 0x4B594241, 1, 1 << 16
HEADER, BLOCK = struct.Struct("<IIiiIIIiIII"), struct.Struct("<QQQQIIiiIIQBB6x")
TABLE_AT = 4096
BYTES = TABLE_AT + MOST_BLOCKS * BLOCK.size
ASKED, ANSWERED, VERB, RESULT, FIRST, COUNT, USED, IMPORTS, WATCHED, USES = 16, 20, 24, 28, 32, 36, 40, 44, 48, 52
MOST_BYTES = 1 << 42  # more than any GPU has: a size beyond it is nonsense
MOST_DEVICES = 64  # the library's own limit
PLACEHOLDER_SIZES = (64 << 20, 20 << 20, 6 << 20, 2 << 20)  # of what stands in for memory that is away
PLACEHOLDERS = sum(PLACEHOLDER_SIZES)  # of a process on a GPU, at most
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW  # without them, reading it could end us by SIGBUS
MOST_ERRNO = 4095
PRIVATE = 2
LOOK = 0.2  # seconds between two looks at whether the process still lives
WAKES = 64  # of a wait without the answer; then it is not the library that wakes us, and each is followed by a pause
PAUSE = 0.001
PIDFD_GETFD = 438  # on x86-64 and arm64


class Verb(IntEnum):
    """What the library can be asked. One that was made before LET_GO or SHUT answers it with EINVAL."""

    PROBE, SHARE, CLOSE, RELEASE, FORGET, REBUILD, COMMIT, DISCARD, LET_GO, SHUT = range(10)


class BlockState(IntEnum):
    """Where a block's bytes are, in the library's terms."""

    UNUSED, BUSY, HERE, SHARED, AWAY, REBUILT = range(6)


NOT_IN_VRAM = BlockState.AWAY, BlockState.REBUILT


class ControlFailed(Exception):
    """The library has refused: `code` is the driver's error, or a negative errno."""

    def __init__(self, verb: Verb, code: int) -> None:
        why = os.strerror(-code) if 0 < -code <= MOST_ERRNO else f"CUDA error {code}"
        super().__init__(f"the preload library answers {verb.name.lower()} with: {why}")
        self.code = code

    @property
    def busy(self) -> bool:
        """A thread of the program was in the middle of an allocation, or of a fork: let it continue, and try again."""
        return self.code == -errno.EBUSY


class ControlUnusable(Exception):
    """The library's page is not as it makes it; or its thread is stopped, hangs in the driver or has ended."""


@dataclass(frozen=True)
class Block:
    """A piece of VRAM in the table, by its `index` there.

    `device` and `descriptor` are the program's numbers; the second is -1 where it has none open.
    """

    index: int
    address: int
    size: int
    state: BlockState
    private: bool
    device: int
    descriptor: int


class Control:
    """The control page of one process. Close it after use."""

    def __init__(self, pid: int, fd: int) -> None:
        """Map the page behind `fd`. Raises ControlUnusable."""
        self.pid = pid
        if os.fstat(fd).st_size != BYTES or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise ControlUnusable(f"the control page of process {pid} does not have its size, or could be resized")
        self._map = mmap.mmap(fd, BYTES)
        self._start = ctypes.c_char.from_buffer(self._map)
        magic, version = struct.unpack_from("<II", self._map)
        if (magic, version) != (MAGIC, VERSION):
            self.close()
            raise ControlUnusable(f"the preload library of process {pid} has version {version}, {VERSION} is expected")

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        del self._start
        self._map.close()

    def blocks(self, first: int = 0, count: int = MOST_BLOCKS) -> list[Block]:
        """Read the table's entries of a range that are in use, and in no thread's hands. Raises ControlUnusable."""
        end = min(self._word(USED), MOST_BLOCKS, first + count)
        table = self._map[TABLE_AT + first * BLOCK.size : TABLE_AT + max(first, end) * BLOCK.size]
        found = [self._block(index, *entry) for index, entry in enumerate(BLOCK.iter_unpack(table), first)]
        return [block for block in found if block is not None]

    def _block(self, index: int, address: int, size: int, *rest: int) -> Block | None:
        _, _, state, flags, device, descriptor, *_ = rest
        if state in (BlockState.UNUSED, BlockState.BUSY):
            return None
        if state > max(BlockState) or not 0 < size <= MOST_BYTES or (size % GRAIN and not flags & PRIVATE):
            raise ControlUnusable(f"block {index} of process {self.pid} has state {state} and {size} bytes")
        if not 0 <= device < MOST_DEVICES:
            raise ControlUnusable(f"block {index} of process {self.pid} is on device {device}")
        return Block(index, address, size, BlockState(state), bool(flags & PRIVATE), device, descriptor)

    def imports(self) -> int:
        """Return how many handles and mappings the process has of memory that another one has made."""
        return self._word(IMPORTS)

    def watch_use(self) -> None:
        """Have the library note the next call that counts as use of a GPU; it then stops to watch."""
        struct.pack_into("<I", self._map, WATCHED, 1)

    def uses(self) -> int:
        """Return how many uses the library has noted; always 0 from one that does not."""
        return self._word(USES)

    @property
    def unanswered(self) -> int | None:
        """The verb that the library has not answered yet, None where it has answered all."""
        return None if self._word(ANSWERED) == self._word(ASKED) else self._word(VERB)

    def ask(self, verb: Verb, *, seconds: float, first: int = 0, count: int = MOST_BLOCKS) -> None:
        """Have the library do something to the blocks from `first` on, and wait.

        A question that was given up may still be answered, so the next one waits for that. Raises ControlFailed and
        ControlUnusable.
        """
        until = time.monotonic() + seconds
        self._await_answer(verb, until)
        for place, value in ((VERB, verb), (FIRST, first), (COUNT, count)):
            struct.pack_into("<I", self._map, place, value)
        struct.pack_into("<I", self._map, ASKED, (self._word(ASKED) + 1) & 0xFFFFFFFF)
        self._await_answer(verb, until)
        (result,) = struct.unpack_from("<i", self._map, RESULT)
        if result:
            raise ControlFailed(verb, result)

    def _await_answer(self, verb: Verb, until: float) -> None:
        """Wait until the process says that it has answered; it can make this a busy loop, but not for long."""
        wakes = 0
        while (answered := self._word(ANSWERED)) != self._word(ASKED):
            wakes += 1
            if wakes > WAKES:
                time.sleep(PAUSE)
            self._wake()  # the process that sent the request may have died before it woke the thread
            left = until - time.monotonic()
            if has_ended(self.pid):
                raise ControlUnusable(
                    f"process {self.pid} has ended before its preload library answered {verb.name.lower()}"
                )
            if left <= 0:
                raise ControlUnusable(f"the preload library of process {self.pid} does not answer {verb.name.lower()}")
            futex.wait(self._address(ANSWERED), answered, min(left, LOOK))

    def _wake(self) -> None:
        futex.wake(self._address(ASKED))

    def _word(self, place: int) -> int:
        (value,) = struct.unpack_from("<I", self._map, place)
        return int(value)

    def _address(self, place: int) -> int:
        return ctypes.addressof(self._start) + place


def must_run(thread: str) -> bool:
    """Return, by its name, whether a thread has to work for the driver and the library while the others are stopped."""
    return thread == NAME or thread.startswith(DRIVER_THREADS)


def is_there(pid: int) -> bool:
    """Return whether the library is loaded in a process and has taken memory over. Raises OSError."""
    return bool(_pages(pid))


def _pages(pid: int) -> list[Region]:
    """Return the mappings that can be a control page. Raises OSError.

    A file of the container may have the same name, and its filesystem be a program of the tenant, which would never
    answer: only what lies where the kernel keeps memfds is opened.
    """
    return [region for region in read_maps(pid) if region.name == MAPPED_AS and region.device == _memfds()]


@functools.cache
def _memfds() -> int:
    """Return the device number of the kernel's own mount for memfds."""
    fd = os.memfd_create(NAME)
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)


def control_of(pid: int) -> Control | None:
    """Return the control page of a process, None where the library is not loaded or has taken nothing over.

    Raises ControlUnusable, and OSError where we may not look.
    """
    try:
        found = _pages(pid)
        if not found:
            return None
        fd = os.open(f"/proc/{pid}/map_files/{found[0].start:x}-{found[0].end:x}", os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return None
    try:
        return Control(pid, fd)
    finally:
        os.close(fd)


def take_descriptor(pidfd: int, descriptor: int) -> int:
    """Return a descriptor of ours for the same open file as `descriptor` of another process. Raises OSError."""
    return _system_call(PIDFD_GETFD, pidfd, descriptor, 0)


def _system_call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result = int(libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
