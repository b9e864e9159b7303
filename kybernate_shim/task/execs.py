"""The execs of a container: further processes that containerd starts in it, each with its own stdio."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from kybernate_shim.errors import Missing, Refused, Taken
from kybernate_shim.messages import events_pb2 as events
from kybernate_shim.oci.preload_spec import has_library, join
from kybernate_shim.task.lifecycle import after
from kybernate_shim.task.process import Process
from kybernate_shim.task.stdio import StdioConfig, quoted

if TYPE_CHECKING:
    from kybernate_shim.task.container import Container


class Execs:
    """The execs of one container, by their ids. They start in parallel: they do not change the container."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._processes: dict[str, Process] = {}

    def find(self, exec_id: str) -> Process:
        """Return an exec. Raises Missing."""
        try:
            return self._processes[exec_id]
        except KeyError:
            raise Missing(f"exec {exec_id} in container {self._container.id}") from None

    def running(self) -> dict[int, str]:
        """Return the ids of running execs by pid."""
        return {process.pid: process.id for process in self._processes.values() if process.state == "running"}

    def add(self, exec_id: str, stdio: StdioConfig, process_json: bytes) -> None:
        """Register an exec. Raises Taken, and Refused unless the container is created or running."""
        container = self._container
        if exec_id in self._processes:
            raise Taken(f"exec {exec_id} in container {container.id}")
        after(container.init.state, "exec")
        edit = partial(join, spec=container.spec) if has_library(container.spec) else None
        container.bundle.write_process(exec_id, process_json, terminal=stdio.terminal, edit=edit)
        self._processes[exec_id] = Process(exec_id, stdio)
        container.publish("/tasks/exec-added", events.TaskExecAdded(container_id=container.id, exec_id=exec_id))

    async def start(self, exec_id: str) -> int:
        """Start a registered exec and return its pid.

        After a failure it is still only registered, as with containerd's own shim.
        """
        container, process = self._container, self.find(exec_id)
        after(process.state, "start")
        if container.exits.of_init is not None:
            raise Refused(f"cannot start exec {exec_id}: the init of container {container.id} has ended")
        with container.exits.starting_exec():  # before the runtime runs: init's exit must be published after this one's
            try:
                process.adopt(await container.open_stdio(process))
                await self._run(process)
            except BaseException:
                process.release()
                process.start_failed()
                raise
        return process.pid

    async def _run(self, process: Process) -> None:
        container = self._container
        assert process.stdio is not None
        with quoted(process.stdio), container.children.early_exits() as early:
            await container.runtime.exec(
                container.id,
                container.bundle,
                process.id,
                fds=process.stdio.fds,
                console_socket=process.stdio.console_socket,
            )
            await process.stdio.started()
            process.pid = container.bundle.exec_pid(process.id)
            process.move("start")
            container.publish(
                "/tasks/exec-started",
                events.TaskExecStarted(container_id=container.id, exec_id=process.id, pid=process.pid),
            )
            container.exits.watch(process, early)

    async def delete(self, exec_id: str) -> Process:
        """Forget an exec that has ended or was never started, and return it."""
        process = self.find(exec_id)
        after(process.state, "delete")
        await self._container.drain(process)
        process.release()
        self._processes.pop(exec_id, None)
        # Once the caller has been answered.
        asyncio.get_running_loop().call_soon(self._container.bundle.forget_exec, exec_id)
        return process
