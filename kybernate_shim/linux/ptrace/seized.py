"""System calls executed in another process, by ptrace(2): x86-64 and arm64.

A thread of the target is seized and stopped, made to execute one system call instruction that its own code already
contains, and put back exactly as it was: a call that the stop interrupted is restarted by the kernel (on arm64 a sleep
starts again). Signals wait until then. ptrace binds a tracee to the tracing thread, so `Held` keeps a dedicated thread
for it: when that thread ends, for any reason, the kernel detaches every tracee that it still held.

Not for a process that waits for any child, by waitpid(-1): that would take the tracees' stops away.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import monotonic

from kybernate_shim.linux.kernel_text import plain, text_of
from kybernate_shim.linux.process_memory import Region, read_maps
from kybernate_shim.linux.ptrace.syscall_abi import Abi, of_this_machine
from kybernate_shim.linux.ptrace.tracee import InjectionFailed, TargetEnded, TargetUnresponsive, Tracee

PROT_READ_WRITE = 3
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS, MAP_NORESERVE = 0x1, 0x2, 0x10, 0x20, 0x4000
MADV_DONTNEED, MADV_DONTFORK, MADV_HUGEPAGE, MADV_DONTNEED_LOCKED = 4, 10, 14, 24
STEP_BYTES = 1 << 30  # of one madvise: its deadline need not grow with the range, other threads get to map between two
DEADLINE = 10.0
EASILY_STOPPED = "RSTt"  # not D: a thread in a driver stops only when the driver lets it


class SeizedProcess:
    """Threads of one process, stopped as long as the context lasts.

    With `spare`, all threads are stopped but those whose name it accepts, and the main thread in any case: its name is
    that of the program, which may be anything. Without, it is one thread that stops readily, which is enough to make
    calls. Every step takes at most `seconds`: a frozen target cannot be stopped. With `tied`, the kernel kills the
    process if we end while it is held, where it would otherwise release its threads. Raises InjectionFailed; nothing is
    held and nothing has been changed then. The methods may be called from any thread.
    """

    def __init__(
        self,
        pid: int,
        *,
        spare: Callable[[str], bool] | None = None,
        seconds: float = DEADLINE,
        tied: bool = False,
    ) -> None:
        self._pid = pid
        self._spare = spare
        self._seconds = seconds
        self._tied = tied
        self._abi = own_abi()
        self._tracees: dict[int, Tracee] = {}
        self._spared: list[int] = []
        self._instruction = 0  # where the last call was made
        self._tracer = ThreadPoolExecutor(1, thread_name_prefix="ptrace")

    def __enter__(self) -> SeizedProcess:
        try:
            self._tracer.submit(self._stop).result()
        except BaseException:
            self._tracer.shutdown()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        letting_go = self._tracer.submit(self._let_go)
        self._tracer.shutdown(wait=False)
        try:
            letting_go.result(self._seconds)
        except TimeoutError:
            pass  # frozen within a call: the tracing thread stays until it is thawed

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def abi(self) -> Abi:
        """The numbers of this machine's calls, for `call`."""
        return self._abi

    @property
    def seconds(self) -> float:
        return self._seconds

    @property
    def spared(self) -> list[int]:
        """The threads that continue, as `spare` decides."""
        return sorted(self._spared)

    @property
    def tids(self) -> list[int]:
        return sorted(self._tracees)

    def call(self, number: int, *arguments: int) -> int:
        """Execute one system call in a held thread and return its result; negative is -errno."""
        return self._tracer.submit(self._call, number, arguments).result()

    def map_anonymous(self, start: int, size: int) -> None:
        """Put empty private memory in place of whatever is mapped there. Raises InjectionFailed."""
        flags = MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS | MAP_NORESERVE
        result = self.call(self._abi.mmap, start, size, PROT_READ_WRITE, flags, -1, 0)
        if result != start:
            raise InjectionFailed(f"mmap in process {self._pid} at {start:#x}: {os.strerror(-result)}")

    def madvise(self, start: int, size: int, advice: int) -> int:
        """Give `advice` on a range in pieces of 1 GiB; return the bytes done, or -errno if none were."""
        for done in range(0, size, STEP_BYTES):
            result = self.call(self._abi.madvise, start + done, min(STEP_BYTES, size - done), advice)
            if result < 0:
                return done or result
        return size

    def _call(self, number: int, arguments: tuple[int, ...]) -> int:
        tracee = next(iter(self._tracees.values()))
        try:
            if not _is_instruction(tracee.tid, self._instruction, self._abi):  # finding it takes 10 ms in a large map
                self._instruction = _find_instruction(tracee.tid, self._abi)
        except (FileNotFoundError, ProcessLookupError):
            raise TargetEnded(f"process {self._pid} has ended") from None
        except OSError as error:
            raise InjectionFailed(f"the code of process {self._pid} cannot be read: {error.strerror}") from error
        return tracee.call(self._instruction, number, arguments, monotonic() + self._seconds)

    def _stop(self) -> None:
        deadline = monotonic() + self._seconds
        try:
            if self._spare is None:
                self._stop_any(deadline)
            else:
                self._stop_all(self._spare, deadline)
            if self._tied:
                self._tie()
        except BaseException:
            self._let_go()
            raise

    def _stop_any(self, deadline: float) -> None:
        failure: InjectionFailed = TargetEnded(f"process {self._pid} has ended")
        for tid in sorted(_threads(self._pid), key=lambda tid: (not _stops_easily(self._pid, tid), tid != self._pid)):
            try:
                self._tracees = {tid: Tracee(tid, self._abi, deadline)}
            except TargetEnded as error:  # the main thread may end before the others
                failure = error
            else:
                return
        raise failure

    def _stop_all(self, spare: Callable[[str], bool], deadline: float) -> None:
        """Stop the threads that are there, then those that they have started since, until there is no new one."""
        ended: set[int] = set()
        while new := [tid for tid in _threads(self._pid) if tid not in self._tracees and tid not in ended]:
            if monotonic() > deadline:
                raise TargetUnresponsive(f"process {self._pid} starts threads faster than they can be stopped")
            for tid in new:
                try:
                    if tid != self._pid and spare(_name(self._pid, tid)):
                        ended.add(tid)
                        self._spared.append(tid)
                    else:
                        self._tracees[tid] = Tracee(tid, self._abi, None)
                except TargetEnded:
                    ended.add(tid)
            for tid in [tid for tid in new if tid in self._tracees]:
                try:
                    self._tracees[tid].arrive(deadline)
                except TargetEnded:
                    ended.add(tid)
                    del self._tracees[tid]
        if not self._tracees:
            raise TargetEnded(f"process {self._pid} has no thread to stop")

    def _tie(self) -> None:
        """Tie it only when all threads have stopped: one that has not is detached only when the tracing thread ends."""
        for tid, tracee in list(self._tracees.items()):
            try:
                tracee.tie()
            except TargetEnded:
                del self._tracees[tid]

    def _let_go(self) -> None:
        for tracee in self._tracees.values():
            tracee.detach()
        self._tracees = {}


def drop_pages_of(held: SeizedProcess, pid: int, start: int, size: int) -> None:
    """Give the pages of a private anonymous range of process `pid`, held by `held`, back; it then reads as zeros.

    Raises InjectionFailed; a part may have been dropped.
    """
    done = held.madvise(start, size, MADV_DONTNEED)
    if done == -errno.EINVAL:  # locked memory, since Linux 5.18 by a separate request
        done = held.madvise(start, size, MADV_DONTNEED_LOCKED)
    if done < 0:
        raise InjectionFailed(f"madvise in process {pid} at {start:#x}: {os.strerror(-done)}")
    if done < size:
        raise InjectionFailed(f"madvise in process {pid} at {start:#x}: only {done} of {size} bytes were dropped")


def advise_huge_pages(pid: int, start: int, size: int, *, seconds: float = DEADLINE) -> None:
    """Have a range of process `pid` filled with transparent huge pages, where the node allows them by madvise.

    Raises InjectionFailed, which can be ignored.
    """
    with SeizedProcess(pid, seconds=seconds) as held:
        done = held.madvise(start, size, MADV_HUGEPAGE)
    if done < size:
        raise InjectionFailed(f"madvise in process {pid} at {start:#x}: {os.strerror(-done) if done < 0 else done}")


def own_abi() -> Abi:
    """Return how calls are made on this machine. Raises InjectionFailed where that is not known."""
    abi = of_this_machine()
    if abi is None:
        raise InjectionFailed("calls can be made in another process on x86-64 and arm64 only")
    return abi


def threads_named(pid: int, wanted: Callable[[str], bool]) -> list[int]:
    """Return the threads of a process whose names are `wanted`."""
    found = []
    for tid in _threads(pid):
        with suppress(TargetEnded):
            if wanted(_name(pid, tid)):
                found.append(tid)
    return sorted(found)


def _threads(pid: int) -> list[int]:
    try:
        return [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _name(pid: int, tid: int) -> str:
    try:
        return plain(text_of(f"/proc/{pid}/task/{tid}/comm").removesuffix("\n"))
    except (FileNotFoundError, ProcessLookupError):
        raise TargetEnded(f"thread {tid} has ended") from None


def _stops_easily(pid: int, tid: int) -> bool:
    try:
        state = text_of(f"/proc/{pid}/task/{tid}/stat").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state in EASILY_STOPPED


def _is_instruction(tid: int, address: int, abi: Abi) -> bool:
    """Return whether a system call instruction, found before, is still there."""
    if not address:
        return False
    fd = os.open(f"/proc/{tid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(fd, len(abi.instruction), address) == abi.instruction
    except OSError:
        return False
    finally:
        os.close(fd)


def _find_instruction(tid: int, abi: Abi) -> int:
    for address, code in _code(tid):
        if (offset := abi.find(code)) >= 0:
            return address + offset
    raise InjectionFailed(f"thread {tid} has no system call instruction in its code")


def _code(tid: int) -> Iterator[tuple[int, bytes]]:
    """Yield the target's executable memory, the vDSO first: it is small and nearly always there."""
    regions = [region for region in read_maps(tid) if "x" in region.perms and region.name != "[vsyscall]"]
    regions.sort(key=lambda region: region.name != "[vdso]")
    fd = os.open(f"/proc/{tid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for region in regions:
            yield from _pieces(fd, region)
    finally:
        os.close(fd)


def _pieces(fd: int, region: Region, size: int = 1 << 20) -> Iterator[tuple[int, bytes]]:
    for address in range(region.start, region.end, size):
        try:
            yield address, os.pread(fd, min(size, region.end - address), address)
        except OSError:
            return
