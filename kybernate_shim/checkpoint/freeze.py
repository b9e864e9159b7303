"""Freezes a container where CRIU can seize it.

A process that has called vfork(2), as shells and posix_spawn(3) do, waits in the kernel until its child executes a
program or ends, and no ptrace stop gets through to it before. The freezer regards both as frozen. CRIU then stops the
child, waits for the parent, and so both wait for each other, until CRIU's own limit expires. So a container that is
caught at that moment is thawed for another moment, and frozen again.

The same goes for a process that a signal has stopped, where the freezer is that of cgroup version 1: there CRIU's
PTRACE_SEIZE waits for a thread that cannot move, and nothing but a thaw ends that.

A process has one tracer at most. Of a traced one, CRIU would try to become the tracer until its own limit expires,
while the tracer is frozen, or is outside the container and may keep its tracee for any time.

A process that was being killed when it was frozen may be a zombie with threads left, which CRIU refuses. They end once
they are thawed.
Sources: ptrace(2); the kernel's ptrace_attach, which waits for JOBCTL_TRAPPING.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from kybernate_shim.linux.cgroup.cgroup import Cgroup, FreezeTimedOut
from kybernate_shim.linux.kcmp import same_memory
from kybernate_shim.linux.process import first_thread_has_ended, is_exiting, parent_of, stranger_that_traces, title_of

SECONDS: Final = 5.0  # a child executes its program within milliseconds, or waits for another process
PAUSE, LONGEST_PAUSE = 0.001, 0.05  # seconds; each is twice the last one
STOPPED: Final = "do_signal_stop"  # the kernel's function in which a stopped thread waits; frozen, its state is D


def freeze_container(cgroup: Cgroup, *, seconds: float = SECONDS) -> None:
    """Freeze the cgroup where CRIU can seize its threads; blocks. What is frozen already may run meanwhile.

    Raises FreezeTimedOut after `seconds`, or as Cgroup.freeze.
    """
    until, pause = time.monotonic() + seconds, PAUSE
    while True:
        cgroup.freeze()
        obstacle = _obstacle(cgroup, seconds)
        if obstacle is None:
            return
        cgroup.thaw()
        if time.monotonic() > until:
            raise obstacle
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def _obstacle(cgroup: Cgroup, seconds: float) -> FreezeTimedOut | None:
    """Return why CRIU could not seize a frozen cgroup, which has been so for `seconds`."""
    pids = cgroup.processes()
    for pair in vforks(pids):
        parent, child = map(title_of, pair)
        return FreezeTimedOut(
            f"{parent} and {child}, its child, have shared their memory for {seconds:g} s, as when a vfork waits"
            f" for the child's program: CRIU cannot seize them. Find out what {child} waits for, and try again"
        )
    for pid in pids:
        if first_thread_has_ended(pid):
            return FreezeTimedOut(
                f"the first thread of {title_of(pid)} has ended and others are left, at each freeze within"
                f" {seconds:g} s: CRIU cannot dump that. Let it wait for them (pthread_join), and try again"
            )
        if tracer := _tracer_of(pid):
            return FreezeTimedOut(
                f"{title_of(pid)} is traced by {title_of(tracer)} (ptrace(2)), at each freeze within {seconds:g} s:"
                " CRIU cannot seize it. End the debugger or tracer, and try again"
            )
    if cgroup.version == 1:
        for pid in filter(is_stopped, pids):
            return FreezeTimedOut(
                f"{title_of(pid)} has been stopped by a signal for {seconds:g} s: with cgroup version 1, CRIU cannot"
                " seize it. Continue it (SIGCONT) or end it, and try again"
            )
    return None


def _tracer_of(pid: int) -> int | None:
    """Return a process that traces a thread of the process, and is none of the node's own."""
    with suppress(FileNotFoundError, ProcessLookupError):
        tasks = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208  # thousands of threads
        return next(filter(None, map(stranger_that_traces, map(int, tasks))), None)
    return None


def is_stopped(pid: int) -> bool:
    """Return whether a signal such as SIGSTOP has stopped a thread of the process, which may be frozen."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return any((task / "wchan").read_text() == STOPPED for task in Path(f"/proc/{pid}/task").iterdir())
    return False


def vforks(pids: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the processes that share the memory of their parent, where that is among them, too.

    They should be frozen. Each pair is (parent, child).
    """
    known = set(pids)
    for child in known:
        try:
            parent = parent_of(child)
            # Exiting processes have no memory any more, and would seem to share it with others that have none.
            if parent in known and same_memory(parent, child) and not is_exiting(child):
                yield parent, child
        except ProcessLookupError:
            pass  # killed, which a frozen process of version 2 can be
