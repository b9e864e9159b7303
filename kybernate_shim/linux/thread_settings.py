"""Settings of threads that CRIU does not keep, read and set from outside: CPUs, timer slack, I/O priority, core dumps.

A thread inherits all of them from the thread that starts it, so a container's threads begin with the shim's. A
program's choice is what differs from that. Only a choice is worth keeping: the rest belongs to the node.
Sources: sched_setaffinity(2), ioprio_set(2), cpuset(7), core(5); /proc/PID/timerslack_ns in proc(5).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

from kybernate_shim.linux.cgroup.hierarchies import UNIFIED, directories
from kybernate_shim.linux.credentials import process_tree
from kybernate_shim.linux.kernel_text import lines_of, text_of
from kybernate_shim.linux.libc import syscall
from kybernate_shim.linux.numa import parse_list
from kybernate_shim.linux.process import oom_score_adj, set_oom_score_adj

MOST_CPUS: Final = 1 << 14
CPU_LIST: Final = re.compile(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*")
IO_CLASS_SHIFT: Final = 13
IO_REAL_TIME: Final = 1
_IOPRIO = {"x86_64": (252, 251), "aarch64": (31, 30)}  # get, set
_THREAD: Final = 1  # IOPRIO_WHO_PROCESS, which means a thread


@dataclass(frozen=True)
class ThreadSettings:
    """What a thread has chosen, by the numbers of its process and itself in the container.

    `cpus` are those that it may run on, in the form "0-3,8"; `timer_slack` is in nanoseconds; `io_priority` has class
    and level as ioprio_get(2) returns them. Of a process, in its first thread alone: `core_filter` says what its
    core dumps hold, `oom_zero` that its oom_score_adj is 0, the only value that CRIU does not restore. "", 0, None and
    False: it has chosen nothing.
    """

    pid: int
    tid: int
    cpus: str = ""
    timer_slack: int = 0
    io_priority: int = 0
    core_filter: int | None = None
    oom_zero: bool = False

    @property
    def wants_real_time_io(self) -> bool:
        return self.io_priority >> IO_CLASS_SHIFT == IO_REAL_TIME

    @property
    def any(self) -> bool:
        numbers = self.cpus or self.timer_slack or self.io_priority
        return bool(numbers or self.oom_zero) or self.core_filter is not None

    @property
    def title(self) -> str:
        return f"process {self.pid}" if self.tid == self.pid else f"thread {self.tid} of process {self.pid}"


class InheritedSettings:
    """What the threads of a container begin with: what this process has. `pid` is one of the container's processes."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.timer_slack = _timer_slack("self")
        self.io_priority = _io_priority(0)
        self.core_filter = _core_filter("self")
        self.oom_zero = oom_score_adj(os.getpid()) == 0

    @cached_property
    def cpus(self) -> tuple[set[int], ...]:
        """The sets of CPUs that are no choice: this process's, and all of the container's."""
        return os.sched_getaffinity(0), cpus_of_container(self._pid)


def chosen(pids: Iterable[int], init: int) -> tuple[ThreadSettings, ...]:
    """Return what the threads of a container's processes have chosen; what ends meanwhile has chosen nothing."""
    usual = InheritedSettings(init)
    return tuple(found for pid in pids for found in _of_process(pid, usual) if found.any)


def put_back(init: int, wanted: Iterable[ThreadSettings]) -> list[str]:
    """Give the threads below `init` what they had chosen, and return a sentence for each thing that is different here.

    The kernel leaves of `cpus` those that the container may use. They should not run: a thread that they start would
    have the earlier settings.
    """
    threads = {one: tid for pid in process_tree(init) for one, tid in _numbers(pid)}
    differences = []
    for one in wanted:
        tid = threads.get((one.pid, one.tid))
        if tid is None:
            differences.append(f"{one.title} was not restored")
        else:
            differences += [f"{one.title}: {text}" for text in _set(tid, one)]
    return differences


def cpus_of_container(pid: int) -> set[int]:
    """Return the CPUs that the cgroup of a process allows, all of the machine's where no cgroup limits them."""
    places = directories(pid)
    if "cpuset" in places:
        return cpu_set((places["cpuset"] / "cpuset.effective_cpus").read_text().strip())
    here = places.get(UNIFIED)
    for directory in (here, *here.parents) if here else ():
        path = directory / "cpuset.cpus.effective"
        if path.exists():
            return cpu_set(path.read_text().strip())
    return cpu_set(Path("/sys/devices/system/cpu/online").read_text().strip())


def cpu_set(text: str) -> set[int]:
    """Parse a list of CPUs such as "0-3,8", of whatever origin. Raises ValueError."""
    if text and not CPU_LIST.fullmatch(text):
        raise ValueError(f"{text[:60]!r} is not a list of CPUs")
    bounds = [int(number) for part in filter(None, text.split(",")) for number in (part.split("-") * 2)[:2]]
    if bounds != sorted(bounds) or bounds[-1:] > [MOST_CPUS]:
        raise ValueError(f"{text[:60]!r} is not a list of CPUs in ascending order")
    return parse_list(text)


def cpu_list(cpus: Iterable[int]) -> str:
    """Return CPUs in the form "0-3,8"."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _of_process(pid: int, usual: InheritedSettings) -> Iterator[ThreadSettings]:
    try:
        tids = [int(name) for name in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208  # thousands of threads
    except (FileNotFoundError, ProcessLookupError):
        return
    for tid in tids:
        try:
            yield _of_thread(pid, tid, usual)
        except (FileNotFoundError, ProcessLookupError):
            continue


def _of_thread(pid: int, tid: int, usual: InheritedSettings) -> ThreadSettings:
    cpus, slack, priority = os.sched_getaffinity(tid), _timer_slack(tid), _io_priority(tid)
    first = tid == pid
    core = _core_filter(pid) if first else usual.core_filter
    settings = ThreadSettings(
        pid,
        tid,
        "" if cpus in usual.cpus else cpu_list(cpus),
        0 if slack == usual.timer_slack else slack,
        0 if priority == usual.io_priority else priority,
        None if core == usual.core_filter else core,
        first and not usual.oom_zero and oom_score_adj(pid) == 0,
    )
    if not settings.any:
        return settings
    process, thread = inside(f"/proc/{pid}/task/{tid}/status")
    return replace(settings, pid=process, tid=thread)


def _numbers(pid: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield the threads of a process, each with its numbers in the container and its number here."""
    for name in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
        yield inside(f"/proc/{pid}/task/{name}/status"), int(name)


def inside(status: str) -> tuple[int, int]:
    """Return a thread's process and its own number as its pid namespace has them, by the path of its status."""
    lines = dict(line.split(":\t", 1) for line in lines_of(text_of(status)) if ":\t" in line)
    return int(lines.get("NStgid", lines["Tgid"]).split()[-1]), int(lines.get("NSpid", lines["Pid"]).split()[-1])


def _set(tid: int, wanted: ThreadSettings) -> Iterator[str]:
    """Set what was chosen, and yield what could not be restored."""
    if wanted.cpus:
        yield from _set_cpus(tid, wanted.cpus)
    if wanted.timer_slack:
        yield from _tried("timer slack", lambda: _write(f"/proc/{tid}/timerslack_ns", str(wanted.timer_slack)))
    if wanted.io_priority:
        yield from _tried("I/O priority", lambda: _set_io_priority(tid, wanted.io_priority))
    if wanted.core_filter is not None:
        filters = f"{wanted.core_filter:#x}"
        yield from _tried("core dump filter", lambda: _write(f"/proc/{tid}/coredump_filter", filters))
    if wanted.oom_zero:
        yield from _tried("OOM score of 0", lambda: set_oom_score_adj(tid, 0))


def _set_cpus(tid: int, wanted: str) -> Iterator[str]:
    try:
        os.sched_setaffinity(tid, cpu_set(wanted))
    except OSError as error:
        yield f"ran on the CPUs {wanted} only, and may use {cpu_list(os.sched_getaffinity(tid))} ({error.strerror})"
        return
    if (found := os.sched_getaffinity(tid)) != cpu_set(wanted):
        yield f"ran on the CPUs {wanted} only, of which it may use {cpu_list(found)}"


def _tried(what: str, change: Callable[[], object]) -> Iterator[str]:
    try:
        change()
    except OSError as error:
        yield f"its {what} could not be set ({error.strerror})"


def _timer_slack(thread: int | str) -> int:
    return int(_read(f"/proc/{thread}/timerslack_ns"))


def _core_filter(process: int | str) -> int:
    return int(_read(f"/proc/{process}/coredump_filter") or b"0", 16)


def _io_priority(tid: int) -> int:
    numbers = _IOPRIO.get(os.uname().machine)
    return syscall(numbers[0], _THREAD, tid, subject=f"thread {tid}") if numbers else 0


def _set_io_priority(tid: int, priority: int) -> None:
    if numbers := _IOPRIO.get(os.uname().machine):
        syscall(numbers[1], _THREAD, tid, priority, subject=f"thread {tid}")


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123  # thousands of threads
        return file.read()


def _write(path: str, text: str) -> None:
    Path(path).write_text(text)
