"""What has to follow a SIGKILL for a container that does not end.

The kernel ends a container when each of its processes has been scheduled once more. Something lost can prevent that: a
thaw, so that the signal is pending in a frozen process; the notice of a child's end; or the end itself, which another
waiter has consumed. containerd waits for the exit indefinitely, so each of these is checked again, and what cannot be
repaired from here is logged.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from itertools import chain, repeat
from signal import SIGKILL
from typing import TYPE_CHECKING, Final

from kybernate_shim.linux.children import KILLED, Exit
from kybernate_shim.linux.process import state_of, title_of, tracer_of

if TYPE_CHECKING:
    from kybernate_shim.task.container import Container

LOOKS: Final = (5.0, 10.0, 20.0)  # seconds between looks: a busy machine takes some to end thousands of processes
LATER: Final = 30.0
NAMED: Final = 5


class Ending:
    """Makes sure that one killed container ends."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._runs = False

    async def until_ended(self) -> None:
        """Return when init's exit is known, and until then repeat what may have been lost. One at a time."""
        if self._runs:
            return
        self._runs = True
        try:
            for seconds in chain(LOOKS, repeat(LATER)):
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._container.init.wait(), seconds)
                if self._container.exits.of_init is not None or not self._container.init.pid:
                    return
                await self._look()
        finally:
            self._runs = False

    async def _look(self) -> None:
        container, pid = self._container, self._container.init.pid
        container.children.reap()
        there = await asyncio.to_thread(_is_there, pid)
        if container.exits.of_init is not None or container.init.pid != pid:
            return
        if container.operation is not None:
            pass  # what it has frozen is thawed by its end or its undo, and a restore that fails has no init any more
        elif there:
            with suppress(OSError):
                os.kill(pid, SIGKILL)  # not reaped yet, so the pid is still its own
            await asyncio.to_thread(self._thaw)
        else:
            container.log.warning("exit.lost", pid=pid)
            container.exits.handle_init(Exit(pid, KILLED, time.time_ns()))
            return
        left = await asyncio.to_thread(self._left)
        container.log.warning("kill.not_ended", pid=pid, processes=left)

    def _thaw(self) -> None:
        cgroup = self._container.cgroup
        with suppress(OSError):
            if cgroup is not None and cgroup.is_held:
                cgroup.thaw()

    def _left(self) -> list[str]:
        """Describe some of the processes: each one's state, as the kernel's letter, and its tracer."""
        cgroup = self._container.cgroup
        pids = cgroup.processes() if cgroup is not None else [self._container.init.pid]
        return [_described(pid) for pid in pids[:NAMED]] + ([f"and {len(pids) - NAMED} more"] * (len(pids) > NAMED))


def _is_there(pid: int) -> bool:
    """Return whether there is such a process, even a zombie."""
    try:
        state_of(pid)
    except ProcessLookupError:
        return False
    return True


def _described(pid: int) -> str:
    try:
        traced = f", traced by {title_of(tracer)}" if (tracer := tracer_of(pid)) else ""
        return f"{title_of(pid)} {state_of(pid)}{traced}"
    except OSError:
        return f"{title_of(pid)} has ended"
