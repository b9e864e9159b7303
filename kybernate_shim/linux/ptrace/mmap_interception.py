"""Intercepts, by ptrace, a mapping that a thread of another process is about to make, and changes it by a plan.

Source: ptrace(2), "Syscall-stops" and PTRACE_GET_SYSCALL_INFO.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import NamedTuple, Protocol

from kybernate_shim.linux.ptrace.followed import Changed, FollowedTracee
from kybernate_shim.linux.ptrace.seized import MAP_ANONYMOUS, MAP_PRIVATE, PROT_READ_WRITE, own_abi
from kybernate_shim.linux.ptrace.tracee import InjectionFailed, TargetEnded

MAP_POPULATE = 0x8000
FLAGS, DESCRIPTOR, OFFSET = 3, 4, 5  # of mmap's arguments
NONE = 2**32 - 1  # the descriptor -1, of which only 32 bits count
PAUSE = 0.0001  # between two looks; the driver makes some 1000 calls for a checkpoint
END_SECONDS = 5.0  # for threads to come out of the kernel, which normally takes microseconds

Call = Callable[..., int]  # makes a system call in the thread, by its number; negative results are -errno


class Asked(NamedTuple):
    """The arguments of an mmap, and the thread that makes it."""

    tid: int
    address: int
    size: int
    protection: int
    flags: int
    descriptor: int
    offset: int

    @property
    def private_anonymous(self) -> bool:
        """Whether it is for memory to read and to write, wherever the kernel likes to have it."""
        plain = self.flags & ~MAP_POPULATE == MAP_PRIVATE | MAP_ANONYMOUS and self.descriptor & NONE == NONE
        return plain and self.protection == PROT_READ_WRITE

    @property
    def populated(self) -> bool:
        """Whether its pages are populated immediately."""
        return bool(self.flags & MAP_POPULATE)


class MappingPlan(Protocol):
    """What is to become of a mapping. The thread waits until it is decided."""

    def change(self, asked: Asked) -> Mapping[int, int] | None:
        """Return what to change of the arguments, by their index; None to leave this mapping alone."""
        ...

    def made(self, start: int, call: Call) -> None:
        """Do what is to be done before the thread continues with the mapping that was changed."""
        ...


class MmapInterception:
    """Watches the calls of `tids` from `start` to `end`, or until one mapping has been changed by `plan`.

    The process's map shows whether the mapping was then made. A thread that ends is no failure. If we die, a watched
    thread continues with the call that it made.
    """

    def __init__(self, tids: Sequence[int], plan: MappingPlan, *, seconds: float) -> None:
        """Raises InjectionFailed on a machine of another kind."""
        self._tids = tids
        self._abi = own_abi()
        self._plan = plan
        self._seconds = seconds
        self._over = False  # nothing is left to watch for
        self._changed: tuple[int, Changed] | None = None  # the thread in the changed call, and that call
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

    def end(self, seconds: float = END_SECONDS) -> None:
        """Release the threads, one in the changed call after that call.

        One that stays in the kernel for longer than `seconds` is detached when it leaves the kernel.
        """
        self._end.set()
        self._thread.join(seconds)

    def _watch(self) -> None:
        tracees: list[FollowedTracee] = []
        try:
            for tid in self._tids:
                tracees.append(FollowedTracee(tid, self._abi, monotonic() + self._seconds))
            for tracee in tracees:
                tracee.go_to_call()
        except InjectionFailed as error:
            self._failure = error
        finally:
            self._ready.set()
        try:
            if self._failure is None:
                self._follow(tracees)
        finally:
            for tracee in tracees:
                tracee.leave()

    def _follow(self, tracees: list[FollowedTracee]) -> None:
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

    def _look(self, tracee: FollowedTracee) -> None:
        """See a call at its entry or at its exit."""
        if (entry := tracee.entered()) is not None:
            number, arguments = entry
            if number == self._abi.mmap and self._changed is None:
                changes = self._plan.change(Asked(tracee.tid, *arguments))
                if changes is not None:
                    self._changed = tracee.tid, tracee.change_arguments(changes)
        elif self._changed is not None and self._changed[0] == tracee.tid:
            self._over = True
            start = tracee.returned()
            if tracee.put_back(self._changed[1]) and start > 0:
                self._plan.made(start, self._call_of(tracee))

    def _call_of(self, tracee: FollowedTracee) -> Call:
        return lambda number, *arguments: tracee.call_here(number, arguments, monotonic() + self._seconds)
