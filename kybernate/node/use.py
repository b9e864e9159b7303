"""Use of GPUs by processes: found by the arena's library in them, or else from outside.

A call waits in the driver while its process is suspended. The library notes that in its control page, of which a word
is read here. Where there is no library, a thread that waits in the driver is recognized by its stack: the innermost
code in it that is not the C library's is libcuda's. A thread that has not moved since the last look costs two calls.
Of processes that are not suspended, the library alone notes calls.

All that is read here is a tenant's: it decides only whether his own container wakes, and whether it counts as idle.
"""

from __future__ import annotations

import bisect
import os
import struct
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kybernate_shim.arena.control import Control, ControlUnusable, control_of, must_run
from kybernate_shim.linux.cgroup.cgroup import Cgroup
from kybernate_shim.linux.kernel_text import lines_of, text_of
from kybernate_shim.linux.process_memory import Region, read_maps

DRIVER: Final = "libcuda.so"
PASSED_OVER: Final = ("libc.so", "libc-", "ld-", "libpthread", "kybernate-arena.so", "libkybernate-arena.so", "[vdso]")
STACK_BYTES: Final = 4096  # from its end on: what a wait for a lock and its callers take
WORD: Final = struct.Struct("<Q")
MOMENT: Final = 0.02  # seconds
MOST_PROCESSES, MOST_THREADS = 512, 4096  # of a container, and of a process: more are not looked at


Switches = Mapping[tuple[int, int], int]  # by process and thread: how often it has given up its CPU


@dataclass
class _Code:
    """Executable mappings of a process, in order of address, and what each is: the driver's, passed over, or other."""

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, regions: Iterable[Region]) -> _Code:
        code = cls()
        for region in regions:
            if "x" in region.perms:
                code.starts.append(region.start)
                code.ends.append(region.end)
                code.kinds.append(_kind(region.name))
        return code

    @property
    def has_driver(self) -> bool:
        return "driver" in self.kinds

    def innermost(self, stack: bytes) -> str:
        """Return what the first address in a stack leads to that is not passed over."""
        for (address,) in WORD.iter_unpack(stack[: len(stack) // WORD.size * WORD.size]):
            place = bisect.bisect_right(self.starts, address) - 1
            if place >= 0 and address < self.ends[place] and self.kinds[place] != "passed over":
                return self.kinds[place]
        return ""


def _kind(name: str) -> str:
    file = name.rpartition("/")[2]
    if file.startswith(DRIVER):
        return "driver"
    return "passed over" if file.startswith(PASSED_OVER) else "other"


class Process:
    """A suspended process. `page` is its library's, None where it has none. Close it after use."""

    def __init__(self, pid: int) -> None:
        """Begin to watch. Raises OSError where it has ended."""
        self.pid = pid
        self.page = _page_of(pid)
        self._seen: dict[int, tuple[str, bool]] = {}  # of each thread: where it was, and whether it waits there
        self._code = _Code.of(read_maps(pid))
        self.watch()

    def close(self) -> None:
        """End; the library may note one more use, which is cheap, and which another watcher may wait for."""
        if self.page is not None:
            self.page.close()
            self.page = None

    @property
    def uses_driver(self) -> bool:
        return self.page is not None or self._code.has_driver

    def is_noted(self) -> bool:
        """Return whether the library has noted a use since the beginning. Costs a look at a word."""
        return self.page is not None and self.page.uses() != self._noted

    def waits(self, before: Switches) -> bool:
        """Return whether a thread waits in the driver, but those that have not run since `before`.

        Raises OSError where the process has ended.
        """
        threads = sorted(int(path.name) for path in Path(f"/proc/{self.pid}/task").iterdir())[:MOST_THREADS]
        seen: dict[int, tuple[str, bool]] = {}
        memory = os.open(f"/proc/{self.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            for thread in threads:
                with suppress(OSError):  # one that has just ended
                    seen[thread] = self._look(thread, memory, before)
        finally:
            os.close(memory)
        self._seen = seen
        return self._stay([(thread, place) for thread, (place, waits) in seen.items() if waits])

    def _stay(self, waiting: list[tuple[int, str]]) -> bool:
        """Return whether one of the threads that wait still does a moment later: a poll may just have met a lock."""
        if not waiting:
            return False
        were: dict[int, int] = {}
        for thread, _ in waiting:
            with suppress(OSError):  # one that has just ended
                were[thread] = _switches(self.pid, thread)
        time.sleep(MOMENT)
        for thread, place in waiting:
            with suppress(OSError):
                now = text_of(f"/proc/{self.pid}/task/{thread}/syscall").strip()
                if now == place and _switches(self.pid, thread) == were.get(thread):
                    return True
            self._seen.pop(thread, None)
        return False

    def watch(self) -> None:
        """Have the next use noted, whatever was before. Costs two words."""
        if self.page is not None:
            self._noted = self.page.uses()
            self.page.watch_use()

    def _look(self, thread: int, memory: int, before: Switches) -> tuple[str, bool]:
        place = text_of(f"/proc/{self.pid}/task/{thread}/syscall").strip()
        known = self._seen.get(thread)
        if known is not None and known[0] == place:
            return known
        words = place.split()
        if len(words) < 3:  # it runs
            return "", False
        stack = os.pread(memory, STACK_BYTES, int(words[-2], 16))
        if self._code.innermost(stack) != "driver":
            return place, False
        known_before = before.get((self.pid, thread))
        if known_before is not None and known_before == _switches(self.pid, thread):
            return place, False
        return place, not must_run(text_of(f"/proc/{self.pid}/task/{thread}/comm").strip())


class Container:
    """The processes of a suspended container.

    `look` blocks, and has a thread of its own, one at a time; the other methods are for the event loop.
    """

    def __init__(self, first: int, before: Switches | None = None) -> None:
        """`first` is its first process. Threads that have not run since `before` count for nothing."""
        self._first = first
        self._before: Switches = before or {}
        self._processes: dict[int, Process] = {}
        self._others: set[int] = set()  # that do not use the driver, or cannot be looked at
        self._found = self._known = False

    def is_used(self) -> bool:
        """Return whether a use was found until now. Costs a look at a word for each process."""
        return self._found or any(process.is_noted() for process in tuple(self._processes.values()))

    def look(self) -> None:
        """Look from outside at processes that have no library, and once at those that have: a call may wait already.

        What is found in a process at the first look counts from the next one on.
        """
        pids = _processes_of(self._first)
        self._found, self._known = self._found or self._known, False
        for pid in self._processes.keys() - pids:
            self._processes.pop(pid).close()
        self._others &= pids
        for process in tuple(self._processes.values()):
            if process.page is None:
                with suppress(OSError):
                    self._found = process.waits(self._before) or self._found
        for pid in sorted(pids - self._processes.keys() - self._others)[:MOST_PROCESSES]:
            self._begin(pid)

    def close(self) -> None:
        for process in self._processes.values():
            process.close()
        self._processes.clear()

    def _begin(self, pid: int) -> None:
        try:
            process = Process(pid)
            if process.uses_driver:
                self._processes[pid] = process
                self._known = process.waits(self._before) or self._known
                return
        except OSError:
            pass
        self._others.add(pid)


class Calls:
    """Counts calls of processes that are not suspended, as far as the library is in them. For the event loop."""

    def __init__(self) -> None:
        self.processes: frozenset[int] = frozenset()  # that are followed, with the library or without
        self._pages: dict[int, Control] = {}
        self._noted: dict[int, int] = {}
        self._count = 0

    def follow(self, processes: frozenset[int], found: Mapping[int, Control]) -> None:
        """Follow these processes; `found` are the pages of those that were not followed before."""
        for pid in self._pages.keys() - processes:
            self._pages.pop(pid).close()
        self._pages |= found
        self.processes = processes

    def count(self) -> int | None:
        """Return a number that has risen if one has called since it was last asked for; None where none can be seen."""
        if not self._pages:
            return None
        noted = {pid: page.uses() for pid, page in self._pages.items()}
        self._count += any(uses != self._noted.get(pid, uses) for pid, uses in noted.items())
        self._noted = noted
        for page in self._pages.values():
            page.watch_use()
        return self._count

    def close(self) -> None:
        self.follow(frozenset(), {})


def pages_of(processes: Iterable[int]) -> dict[int, Control]:
    """Return the pages of those that have the library. A process may block this, and it has a thread of its own."""
    return {pid: page for pid in sorted(processes)[:MOST_PROCESSES] if (page := _page_of(pid)) is not None}


def _page_of(pid: int) -> Control | None:
    try:
        return control_of(pid)
    except (ControlUnusable, OSError):
        return None


def switches_of(first: int) -> Switches:
    """Return how often each thread of a container has given up its CPU. Waits for no process: for the event loop."""
    found: dict[tuple[int, int], int] = {}
    for pid in sorted(_processes_of(first))[:MOST_PROCESSES]:
        with suppress(OSError):
            for path in Path(f"/proc/{pid}/task").iterdir():
                with suppress(OSError):
                    found[pid, int(path.name)] = _switches(pid, int(path.name))
                if len(found) >= MOST_THREADS:
                    return found
    return found


def _switches(pid: int, thread: int) -> int:
    lines = lines_of(text_of(f"/proc/{pid}/task/{thread}/status"))
    return sum(int(line.split()[1]) for line in lines if "voluntary_ctxt_switches:" in line)


def _processes_of(first: int) -> set[int]:
    try:
        return set(Cgroup.of(first).processes())
    except OSError:
        return {first}
