"""A mapping that a thread of another process is about to make, caught by ptrace and made of a file of ours instead.

Who asks for much private anonymous memory, to fill it, gets a shared mapping of that file: what it writes is in the
file then, and nobody has to copy it there. Source: ptrace(2), "Syscall-stops" and PTRACE_GET_SYSCALL_INFO.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic

from kybernate_shim.linux.ptrace import MAP_ANONYMOUS, MAP_PRIVATE, MAP_SHARED, PROT_READ_WRITE
from kybernate_shim.linux.syscall_abi import Abi
from kybernate_shim.linux.tracee import InjectionFailed, TargetEnded, Tracee

MAP_POPULATE = 0x8000
FLAGS, DESCRIPTOR, OFFSET = 3, 4, 5  # of mmap's arguments
NONE = 2**32 - 1  # the descriptor -1, of which only 32 bits count
PAUSE = 0.0001  # between two looks; the driver makes some 1000 calls for a checkpoint


class MappingCatch:
    """Watches the calls of `tids` from `start` to `end`, and changes the first mmap of `smallest` bytes or more.

    `offer` is told how many bytes are wanted, while the thread waits, and returns the number that our file's descriptor
    has in the process, or None to let it be. Whether it has been mapped then is for the process's map to tell. A thread
    that ends is no failure. Whoever is watched goes on as it was asked to when we die.
    """

    def __init__(
        self, tids: Sequence[int], abi: Abi, smallest: int, offer: Callable[[int], int | None], *, seconds: float
    ) -> None:
        self._tids = tids
        self._abi = abi
        self._smallest = smallest
        self._offer = offer
        self._seconds = seconds
        self._over = False  # there is nothing to look for any more
        self._changed: tuple[int, dict[int, int]] | None = None  # who is in the changed call, and its own arguments
        self._failure: BaseException | None = None
        self._ready, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mapping-catch", daemon=True)

    def start(self) -> None:
        """Begin to watch. Raises InjectionFailed, with nothing changed."""
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    def end(self, seconds: float) -> None:
        """Let the threads go, one in the changed call behind that.

        One that is so deep in the kernel that it takes longer than `seconds` is let go of when it comes out.
        """
        self._end.set()
        self._thread.join(seconds)

    def _watch(self) -> None:
        tracees: list[Tracee] = []
        try:
            for tid in self._tids:
                tracees.append(Tracee(tid, self._abi, monotonic() + self._seconds, followed=True))
            for tracee in tracees:
                tracee.go_to_call()
        except InjectionFailed as error:
            self._failure = error
        finally:
            self._ready.set()
        if self._failure is None:
            self._follow(tracees)
        for tracee in tracees:
            tracee.leave()

    def _follow(self, tracees: list[Tracee]) -> None:
        while tracees and not self._over and (self._changed is not None or not self._end.is_set()):
            seen = False
            for tracee in list(tracees):
                try:
                    if tracee.at_call():
                        seen = True
                        self._look(tracee)
                        tracee.go_to_call()
                except TargetEnded:
                    tracees.remove(tracee)
                    self._over = self._over or (self._changed is not None and self._changed[0] == tracee.tid)
            if not seen:
                self._end.wait(PAUSE)

    def _look(self, tracee: Tracee) -> None:
        """See a call at its entry or at its exit."""
        if (entry := tracee.entered()) is not None:
            number, arguments = entry
            if number == self._abi.mmap and self._changed is None and self._is_wanted(arguments):
                self._catch(tracee, arguments)
        elif self._changed is not None and self._changed[0] == tracee.tid:
            tracee.change_arguments(self._changed[1])
            self._over = True

    def _is_wanted(self, arguments: Sequence[int]) -> bool:
        _, size, protection, flags, descriptor, _ = arguments
        anonymous = flags & ~MAP_POPULATE == MAP_PRIVATE | MAP_ANONYMOUS and descriptor & NONE == NONE
        return anonymous and protection == PROT_READ_WRITE and size >= self._smallest

    def _catch(self, tracee: Tracee, arguments: Sequence[int]) -> None:
        size, flags = arguments[1], arguments[FLAGS]
        descriptor = self._offer(size)
        if descriptor is None:
            self._over = True
            return
        shared = flags & ~(MAP_PRIVATE | MAP_ANONYMOUS) | MAP_SHARED
        own = tracee.change_arguments({FLAGS: shared, DESCRIPTOR: descriptor, OFFSET: 0})
        self._changed = tracee.tid, own
