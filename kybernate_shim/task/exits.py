"""The exits of a container's processes, in the order in which containerd expects them: init's is the last one.

They are handled on the event loop between two awaits, so they need no lock.

containerd's client stops opening its FIFOs when it gets an exit, and unread output is lost if it had not opened them
yet. So an exit waits a moment for a client that has not read the latest output.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from kybernate_shim.errors import Missing
from kybernate_shim.linux.children import EarlyExits, Exit
from kybernate_shim.messages import events_pb2 as events
from kybernate_shim.task.oom_reports import OomReports
from kybernate_shim.task.process import Process

if TYPE_CHECKING:
    from kybernate_shim.task.container import Container


class Exits:
    """Waits for the exits of one container. `of_init` is init's, which may be known before it is published."""

    def __init__(self, container: Container, oom: OomReports) -> None:
        self.of_init: Exit | None = None
        self._container = container
        self._oom = oom
        self._running_execs = 0
        self._kills = 0
        self._unread = 0  # exits that wait for a client
        self._background: set[asyncio.Task[None]] = set()

    @contextmanager
    def starting_exec(self) -> Iterator[None]:
        """Hold back init's exit until this exec has ended, or has failed to start."""
        self._running_execs += 1
        try:
            yield
        except BaseException:
            self._running_execs -= 1
            self._settle()
            raise

    @contextmanager
    def killing_init(self) -> Iterator[None]:
        """Hold back init's exit until the runtime's return.

        At the exit, containerd deletes the task and closes the connection on which this call still waits.
        """
        self._kills += 1
        try:
            yield
        finally:
            self._kills -= 1
            asyncio.get_running_loop().call_soon(self._settle)

    def watch(self, process: Process, early: EarlyExits) -> None:
        """Handle the exit of `process` when it comes, or now if it came while the runtime was still at work."""
        if process.pid == 0 or process.exit is not None:
            return
        handle = self.handle_init if process is self._container.init else partial(self._handle_exec, process)
        if exit_ := early.take(process.pid):
            handle(exit_)
        else:
            self._container.children.claim(process.pid, handle)

    def handle_init(self, exit_: Exit) -> None:
        container = self._container
        self.of_init = exit_
        if not container.spec.own_pid_namespace:
            self.in_background(self._kill_rest())  # the kernel kills the rest only in a private pid namespace
        if container.init.state == "held":
            self.in_background(container.operations().end_held())  # the rest of it, too
        if container.init.state in ("paused", "pausing"):
            # The rest of a frozen container cannot die.
            self.in_background(container.runtime.resume(container.id, container.cgroup))
        self._once_read(container.init, lambda: None)

    def _handle_exec(self, process: Process, exit_: Exit) -> None:
        process.reaped = True
        self._once_read(process, partial(self._end_exec, process, exit_))

    def _end_exec(self, process: Process, exit_: Exit) -> None:
        process.end(exit_)
        self._publish(process)
        self._running_execs -= 1

    def _once_read(self, process: Process, then: Callable[[], None]) -> None:
        """Do `then`, and settle, when no client is about to read output of `process`: usually immediately."""
        behind = False
        with suppress(OSError):  # no descriptor is left for the check: the exit is published in any case
            behind = process.reader_is_behind
        if behind:
            self._unread += 1
            self.in_background(self._read_first(process, then))
        else:
            then()
            self._settle()

    async def _read_first(self, process: Process, then: Callable[[], None]) -> None:
        try:
            await process.read()
        finally:
            self._unread -= 1
            then()
            self._settle()

    async def _kill_rest(self) -> None:
        try:
            await self._container.runtime.kill(self._container.id, 9, all=True)
        except Missing:
            pass

    def _settle(self) -> None:
        """Declare the container stopped once init and every exec have ended: init's exit is the last one."""
        init = self._container.init
        if self.of_init is None or self._running_execs or self._kills or self._unread or init.exit is not None:
            return
        with suppress(OSError):
            self._oom.report()
        self._oom.stop()
        init.end(self.of_init)
        self._publish(init)

    def _publish(self, process: Process) -> None:
        assert process.exit is not None
        id = self._container.id
        event = events.TaskExit(container_id=id, id=process.id or id, pid=process.pid, exit_status=process.exit.status)
        event.exited_at.FromNanoseconds(process.exit.at_ns)
        self._container.publish("/tasks/exit", event)

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it in the background; a failure is logged."""
        task = asyncio.get_running_loop().create_task(self._logged(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _logged(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001  # no caller waits for it; only the log gets the error
            self._container.log.warning("task.cleanup_failed", error=str(error))
