"""Signals for a container's processes: a SIGKILL for init also ends a running operation."""

from __future__ import annotations

import os
from signal import SIGKILL
from typing import TYPE_CHECKING

from kybernate_shim.errors import Missing, Refused
from kybernate_shim.task.ending import Ending

if TYPE_CHECKING:
    from kybernate_shim.task.container import Container


class Killing:
    """Kill of one container."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._ending = Ending(container)

    async def kill(self, exec_id: str, signal: int, *, all: bool) -> None:
        """Send `signal`. Raises Missing when the process has ended, and Refused for an exec that was not started."""
        container = self._container
        process = container.process(exec_id)
        whole = all and not exec_id  # other processes of the container may outlive init in a shared pid namespace
        if not whole and (process.reaped or (process is container.init and container.exits.of_init is not None)):
            raise Missing("process already finished")
        if not exec_id:
            await self._kill_init(signal, all=all)
        elif process.pid == 0:
            raise Refused(f"exec {exec_id} of container {container.id} has not been started")
        else:
            try:
                os.kill(process.pid, signal)  # not reaped yet, so the pid is still its own
            except ProcessLookupError as error:
                raise Missing("process already finished") from error

    async def _kill_init(self, signal: int, *, all: bool) -> None:
        """Signal init; its exit waits for the runtime's return.

        A held container is ended by a signal that asks it to end, without running again: its image is what continues.
        """
        container = self._container
        if container.init.state == "held":
            from kybernate_shim.checkpoint.hold import ENDING  # loaded with the checkpoint that holds it

            if signal in ENDING:
                with container.exits.killing_init():
                    await container.operations().end_held()
                return
        aborted = signal == SIGKILL and container.abort_operation()
        if signal == SIGKILL and container.init.pid:
            container.exits.in_background(self._ending.until_ended())
        with container.exits.killing_init():
            try:
                await container.runtime.kill(
                    container.id, signal, all=all, init=self._alone(signal), cgroup=container.cgroup
                )
            except Missing:
                if not aborted:  # else the end of the checkpoint has killed it before the runtime could
                    raise

    def _alone(self, signal: int) -> int:
        """Return the pid of init where the signal is for it alone, else 0.

        Init's end ends all processes only where the kernel does that: elsewhere, a SIGKILL is for each of them.
        """
        container = self._container
        return container.init.pid if signal != SIGKILL or container.spec.own_pid_namespace else 0
