"""Freezes a container where CRIU can take hold of it.

A process that has called vfork(2), as shells and posix_spawn(3) do, waits in the kernel until its child executes a
program or ends, and no ptrace stop gets through to it before. The freezer takes both for frozen. CRIU then stops the
child, waits for the parent, and so both wait for each other, until CRIU's own limit is over. So a container that is
caught at that moment is let run for another one, and frozen anew.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Final

from kybernate_shim.linux.cgroups import Cgroup, FreezeTimedOut
from kybernate_shim.linux.libc import same_memory
from kybernate_shim.linux.process import is_exiting, parent_of, title_of

SECONDS: Final = 5.0  # a child executes its program within milliseconds, or waits for somebody
PAUSE, LONGEST_PAUSE = 0.001, 0.05  # seconds; each is twice the last one


class MemoryShared(FreezeTimedOut):
    """Whenever the cgroup was frozen, some process shared its memory with its child; it has been thawed again."""


def stand_still(cgroup: Cgroup, *, seconds: float = SECONDS) -> None:
    """Freeze the cgroup, though not in the middle of a vfork(2); blocks. What is frozen already may run meanwhile.

    Raises MemoryShared after `seconds`, or as Cgroup.freeze.
    """
    until, pause = time.monotonic() + seconds, PAUSE
    while True:
        cgroup.freeze()
        pair = next(vforks(cgroup.processes()), None)
        if pair is None:
            return
        parent, child = map(title_of, pair)
        cgroup.thaw()
        if time.monotonic() > until:
            raise MemoryShared(
                f"{parent} and {child}, its child, have shared their memory for {seconds:g} s, as when a vfork waits"
                f" for the child's program: CRIU cannot take hold of them. See what {child} waits for, and try again"
            )
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def vforks(pids: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield those of the processes that share the memory of their parent, which is one of them, too, as its children.

    They should stand still. Each pair is (parent, child).
    """
    known = set(pids)
    for child in known:
        try:
            parent = parent_of(child)
            # What is on its way out has no memory any more, which is the same as that of others without.
            if parent in known and same_memory(parent, child) and not is_exiting(child):
                yield parent, child
        except ProcessLookupError:
            pass  # killed, which a frozen process of version 2 can be
