"""A container: its init, its execs, and what may happen to them in which order.

One lock per container orders the calls that change it. What only looks (State, Wait, Pids, Stats, Connect) and Kill
take no lock: they are answered while a checkpoint of minutes runs. Exits are handled on the event loop between two
awaits, so they need none either.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from signal import SIGKILL
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from kybernate_shim.config import Config, ConfigInvalid
from kybernate_shim.linux.cgroups import Cgroup
from kybernate_shim.linux.children import Children, EarlyExits, Exit
from kybernate_shim.linux.mounts import Mount, mount_rootfs, unmount_tree
from kybernate_shim.linux.oom import OomWatch
from kybernate_shim.logs import Log
from kybernate_shim.messages import events_pb2 as events
from kybernate_shim.oci.bundle import Bundle, Remains
from kybernate_shim.oci.options import RuntimeOptions, effective_config
from kybernate_shim.oci.runtime import ContainerMissing, ProcessGone, Runtime
from kybernate_shim.oci.spec import Spec
from kybernate_shim.task.gpu_states import GpuStates
from kybernate_shim.task.lifecycle import after
from kybernate_shim.task.process import Process
from kybernate_shim.task.stdio import Stdio, StdioConfig, open_stdio
from kybernate_shim.trace import step
from kybernate_shim.undo import AsyncUndo

if TYPE_CHECKING:
    from kybernate_shim.checkpoint.dump import Dumped, DumpRequest
    from kybernate_shim.checkpoint.gpu import ArenaUse, Left
    from kybernate_shim.checkpoint.image import Image
    from kybernate_shim.checkpoint.operation import Operation
    from kybernate_shim.task.operations import Operations

Publish = Callable[[str, Message], None]
KILLED = 137  # the status of a process that nobody saw end: as if by SIGKILL
LAST_EXIT_SECONDS = 5.0
PAUSE = "kybernate.io/pause"  # "suspend": a pause takes the container off its GPUs, too


class ExecNotFound(Exception):
    """No exec of that id in this container."""


class ExecExists(Exception):
    """The exec id is taken."""


class InitGone(Exception):
    """The container's init has ended, so nothing can be started in it any more."""


class NotStarted(Exception):
    """The exec has not been started yet, so it cannot be signalled."""


class Container:
    """A container from Create to Delete. Every method that changes it may be called at any time, in any state."""

    def __init__(
        self,
        id: str,
        *,
        namespace: str,
        bundle: Bundle,
        spec: Spec,
        options: RuntimeOptions,
        config: Config,
        runtime: Runtime,
        children: Children,
        publish: Publish,
        log: Log,
        stdio: StdioConfig,
        image: Image | None = None,
    ) -> None:
        self.id = id
        self.namespace = namespace
        self.bundle = bundle
        self.spec = spec
        self.options = options
        self.config = config
        self.runtime = runtime
        self.image = image
        self.children = children
        self.lock = asyncio.Lock()
        self.gpu = GpuStates(id)
        self._node_config: Config | None = None  # that `config` follows
        self.init = Process("", stdio, state="restorable" if image else "created")
        self.execs: dict[str, Process] = {}
        self.cgroup: Cgroup | None = None
        self._publish = publish
        self._log = log.bind(task=id)
        self._mounts: list[Mount] = []
        self._init_exit: Exit | None = None
        self._running_execs = 0
        self._kills = 0
        self._oom: OomWatch | None = None
        self._phase = "create"
        self._locked_pids: tuple[int, ...] = ()
        self._operations: Operations | None = None
        self._background: set[asyncio.Task[None]] = set()

    @property
    def init_pid(self) -> int:
        return self.init.pid

    def configure(self, node: Config) -> None:
        """Follow the node's settings, which a call has found changed; not in the middle of an operation."""
        if node is self._node_config or self.lock.locked():
            return
        self._node_config = node
        try:
            self.config = self.config.replaced_by(effective_config(node, self.options))
        except ConfigInvalid as error:  # with the container's own options
            self._log.error("config.not_used", error=str(error), state="the settings from before stay in use")
            return
        if self.runtime.deadlines != self.config.deadlines:
            self.runtime = replace(self.runtime, deadlines=self.config.deadlines)

    # -- Create and Delete ------------------------------------------------------------------------------------------

    async def create(self, mounts: list[Mount], event: events.TaskCreate) -> None:
        """Mount the rootfs and let the runtime create init; undo all of it when a step fails.

        A container that is created from a checkpoint is only prepared: its processes come at Start, because containerd
        still changes its files in between.
        """
        async with AsyncUndo() as undo:
            self._mounts = mounts
            if mounts:
                undo.push_async_callback(self._unmount)
                await asyncio.to_thread(
                    mount_rootfs, mounts, self.bundle.rootfs, run=partial(self._run_helper, asyncio.get_running_loop())
                )
                step("mounted")
            self.init.adopt(await self._open_stdio(self.init))
            step("stdio opened")
            undo.callback(self.init.release)
            if self.image is None:
                undo.push_async_callback(self._forget_in_runtime)
                undo.callback(self._stop_watching_memory)
                await self._create_init(event)
            else:
                self._publish("/tasks/create", event)
            undo.pop_all()

    async def _create_init(self, event: events.TaskCreate) -> None:
        assert self.init.stdio is not None
        with _quoted(self.init.stdio), self.children.early_exits() as early:
            await self.runtime.create(
                self.id,
                self.bundle,
                fds=self.init.stdio.fds,
                console_socket=self.init.stdio.console_socket,
                options=self.options,
            )
            step("runtime created")
            await self.init.stdio.started()
            self.find_init()
            event.pid = self.init.pid
            self._watch_memory()  # before it starts: it may run out of memory within milliseconds
            step("cgroup found")
            self.note(phase="idle")
            step("noted")
            self._publish("/tasks/create", event)
            self._watch(self.init, early)

    async def delete(self) -> Process:
        """Remove the container that has ended or was never started, and return its init.

        Raises InvalidMove while it runs, and UnmountFailed when the rootfs is still in use: the container then stays
        known, so that the call can be repeated.
        """
        async with self.lock:
            after(self.init.state, "delete")
            if self.init.state == "stopped":
                await self._drain(self.init)
                step("output drained")
                self._thaw()
            await self._forget_in_runtime(force=False)
            step("runtime deleted")
            await self._await_last_exit()
            self.init.release()
            if self._mounts:
                await self._unmount()
                step("unmounted")
            self.init.move("delete")
            return self.init

    def _thaw(self) -> None:
        """Let nothing look paused that has ended: a frozen init can be killed on cgroup v2, and runc is not told."""
        if self.cgroup is not None:
            with suppress(OSError):
                self.cgroup.thaw()

    async def _await_last_exit(self) -> None:
        """The runtime kills the init of a container that was never started: let its exit event come first."""
        if self.init.pid and self.init.exit is None:
            try:
                await asyncio.wait_for(self.init.wait(), LAST_EXIT_SECONDS)
            except TimeoutError:
                self._log.warning("exit.lost", pid=self.init.pid)
                self._on_init_exit(Exit(self.init.pid, KILLED, time.time_ns()))

    async def _forget_in_runtime(self, *, force: bool = True) -> None:
        try:
            await self.runtime.delete(self.id, force=force)
        except ContainerMissing:
            pass  # it never got that far, or a checkpoint that ends the container removed it

    def _run_helper(self, loop: asyncio.AbstractEventLoop, argv: Sequence[str]) -> None:
        """Run a mount helper for a thread: children belong to the event loop. Raises OSError when it fails."""
        done = asyncio.run_coroutine_threadsafe(self.children.run(argv), loop).result()
        if done.status:
            raise OSError(errno.EIO, f"{argv[0]} ended with status {done.status}: {done.stderr.strip()}")

    async def _unmount(self) -> None:
        await asyncio.to_thread(unmount_tree, self.bundle.rootfs)

    async def _open_stdio(self, process: Process) -> Stdio:
        return await open_stdio(
            process.stdio_config,
            children=self.children,
            container=self.id,
            namespace=self.namespace,
            uid=self.options.io_uid,
            gid=self.options.io_gid,
            log=self._log,
            piped=self.image.piped_streams() if self.image and process is self.init else (),
        )

    def note(self, *, phase: str) -> None:
        """Leave word in the bundle of what a `delete` without this daemon would have to undo."""
        self._phase = phase
        self._write_remains()

    def note_locked(self, pids: Sequence[int]) -> None:
        self._locked_pids = tuple(pids)
        self._write_remains()

    def _write_remains(self) -> None:
        cli = self.runtime.cli
        self.bundle.write_remains(
            Remains(
                str(cli.binary),
                str(cli.root),
                cli.systemd_cgroup,
                phase=self._phase,
                locked_pids=self._locked_pids,
            )
        )

    # -- Start and exec ---------------------------------------------------------------------------------------------

    async def start(self) -> int:
        """Let init run, or restore it from its image, and return its pid."""
        async with self.lock:
            after(self.init.state, "start")
            if self.image is not None:
                await self.operations().restore(self.image)
                return self.init.pid
            with self.children.early_exits() as early:
                # From here on an exit waits in the collector, so that it cannot be published before the start.
                self.children.disclaim(self.init.pid)
                try:
                    await self.runtime.start(self.id, waiting=None if self._is_frozen() else self.init.pid)
                except BaseException:
                    self._watch(self.init, early)
                    raise
                step("runtime started")
                self._announce_start()
                self._watch(self.init, early)
            return self.init.pid

    def _is_frozen(self) -> bool:
        """Tell whether someone has frozen the container, so that it could not start."""
        try:
            return self.cgroup is not None and self.cgroup.frozen
        except OSError:
            return False  # nothing there to freeze it by

    def find_init(self) -> None:
        """Take over the init that the runtime has made."""
        self.init.pid = self.bundle.init_pid()
        self.cgroup = _cgroup_of(self.init.pid)

    def lose_init(self) -> None:
        """Be without an init, as before a restore that has failed."""
        self.init.pid, self.cgroup = 0, None
        self.note_locked(())

    def restored(self, early: EarlyExits) -> None:
        """Be running: the processes of an image are there."""
        self._announce_start()
        self._watch_memory()
        self._watch(self.init, early)

    def _announce_start(self) -> None:
        self.init.move("start")
        self._publish("/tasks/start", events.TaskStart(container_id=self.id, pid=self.init.pid))

    # -- Checkpoint and restore, GPUs ---------------------------------------------------------------------------------

    def operations(self) -> Operations:
        """Return what checkpoints, restores, suspends and resumes this container.

        Loaded on use: most containers are only started, and the first of a node waits for every module.
        """
        if self._operations is None:
            from kybernate_shim.task.operations import Operations

            self._operations = Operations(self, self._log)
        return self._operations

    async def checkpoint(self, request: DumpRequest) -> tuple[Dumped, Operation]:
        """Write a checkpoint image; the container is as before afterwards, or gone if `request` says so.

        A SIGKILL from `kill` ends the checkpoint, too: whoever wants the container dead does not want to wait for it.
        """
        self.gpu.require("checkpoint")
        async with self.lock:
            after(self.init.state, "checkpoint")
            return await self.operations().checkpoint(request)

    async def suspend(self, *, lock_seconds: float = 0) -> tuple[Left, Operation]:
        """Move the container's VRAM into host memory; its processes wait for `unsuspend`. Once more is no error."""
        self.gpu.require("suspend")
        async with self.lock:
            after(self.init.state, "suspend")
            return await self.operations().suspend(lock_seconds)

    async def unsuspend(self, *, restore_seconds: float = 0, room_seconds: float = 0) -> tuple[Left, Operation]:
        """Undo `suspend`, and bring back whoever was left without its GPU by other means."""
        self.gpu.require("resume")
        async with self.lock:
            after(self.init.state, "suspend")
            return await self.operations().unsuspend(restore_seconds, room_seconds)

    @property
    def operation(self) -> Operation | None:
        """The operation that runs now."""
        return self._operations.current if self._operations is not None else None

    @property
    def suspended(self) -> bool:
        """Whether its VRAM is in host memory, by a suspend of ours."""
        return self.gpu.state == "suspended"

    @property
    def arena_use(self) -> ArenaUse | None:
        """What its last suspend has moved into the arena, None before the first."""
        return self._operations.arena_use if self._operations is not None else None

    @property
    def _pause_suspends(self) -> bool:
        return self.config.pods_choice(self.spec.annotations, PAUSE) == "suspend"

    # -- Exec ---------------------------------------------------------------------------------------------------------

    def add_exec(self, exec_id: str, stdio: StdioConfig, process_json: bytes) -> None:
        """Register an exec. Raises ExecExists, and InvalidMove unless the container is created or running."""
        if exec_id in self.execs:
            raise ExecExists(f"exec {exec_id} in container {self.id}")
        after(self.init.state, "exec")
        self.bundle.write_process(exec_id, process_json, terminal=stdio.terminal)
        self.execs[exec_id] = Process(exec_id, stdio)
        self._publish("/tasks/exec-added", events.TaskExecAdded(container_id=self.id, exec_id=exec_id))

    async def start_exec(self, exec_id: str) -> int:
        """Start a registered exec and return its pid. Execs start side by side: they do not change the container.

        After a failure it is still only registered, as with containerd's own shim.
        """
        process = self.process(exec_id)
        after(process.state, "start")
        if self._init_exit is not None:
            raise InitGone(f"cannot start exec {exec_id}: the init of container {self.id} has ended")
        self._running_execs += 1  # before the runtime runs: init's exit must be published after this exec's
        try:
            process.adopt(await self._open_stdio(process))
            await self._run_exec(process)
        except BaseException:
            self._running_execs -= 1
            process.release()
            process.start_failed()
            self._settle()
            raise
        return process.pid

    async def _run_exec(self, process: Process) -> None:
        assert process.stdio is not None
        with _quoted(process.stdio), self.children.early_exits() as early:
            await self.runtime.exec(
                self.id,
                self.bundle,
                process.id,
                fds=process.stdio.fds,
                console_socket=process.stdio.console_socket,
            )
            await process.stdio.started()
            process.pid = self.bundle.exec_pid(process.id)
            process.move("start")
            self._publish(
                "/tasks/exec-started",
                events.TaskExecStarted(container_id=self.id, exec_id=process.id, pid=process.pid),
            )
            self._watch(process, early)

    async def delete_exec(self, exec_id: str) -> Process:
        """Forget an exec that has ended or was never started, and return it."""
        process = self.process(exec_id)
        after(process.state, "delete")
        await self._drain(process)
        process.release()
        self.execs.pop(exec_id, None)
        asyncio.get_running_loop().call_soon(self.bundle.forget_exec, exec_id)  # once the caller has been answered
        return process

    async def _drain(self, process: Process) -> None:
        seconds = self.config.deadlines.io_drain
        if not await process.drain(seconds):
            self._log.warning(
                "stdio.abandoned", exec=process.id, error=f"output still open {seconds:g} s after the exit"
            )

    def process(self, exec_id: str) -> Process:
        """Return init for the empty id. Raises ExecNotFound."""
        if not exec_id:
            return self.init
        try:
            return self.execs[exec_id]
        except KeyError:
            raise ExecNotFound(f"exec {exec_id} in container {self.id}") from None

    async def pids(self) -> list[int]:
        """Return the pids, on the host, of all processes in the container.

        A container that waits for its restore has none; the daemon's own stands in, because containerd removes tasks
        without a pid when it restarts.
        """
        if self.init.state == "restorable":
            return [os.getpid()]
        return self.cgroup.processes() if self.cgroup is not None else []

    # -- Signals, freezer, limits -----------------------------------------------------------------------------------

    async def kill(self, exec_id: str, signal: int, *, all: bool) -> None:
        """Send `signal`. Raises ProcessGone when there is nothing left to signal."""
        process = self.process(exec_id)
        if process.exit is not None or (process is self.init and self._init_exit is not None and not all):
            raise ProcessGone("process already finished")
        if not exec_id:
            await self._kill_init(signal, all=all)
        elif process.pid == 0:
            raise NotStarted(f"exec {exec_id} of container {self.id} has not been started")
        else:
            try:
                os.kill(process.pid, signal)  # not reaped yet, so the pid is still its own
            except ProcessLookupError as error:
                raise ProcessGone("process already finished") from error

    async def _kill_init(self, signal: int, *, all: bool) -> None:
        """Signal init; its exit waits for the runtime's return.

        On the exit containerd deletes the task and closes the connection on which this very call still waits.
        """
        if signal == SIGKILL and self._operations is not None:
            self._operations.abort()
        self._kills += 1
        try:
            await self.runtime.kill(self.id, signal, all=all)
        finally:
            self._kills -= 1
            asyncio.get_running_loop().call_soon(self._settle)

    async def pause(self) -> None:
        """Freeze it, off its GPUs where that is wanted; a freeze that fails brings back what has left them for it."""
        self.gpu.require("pause")
        async with self.lock:
            self.init.move("pause")
            suspended_before = self.suspended
            try:
                if self._pause_suspends:
                    await self.operations().suspend_if_on_gpu()
                await self.runtime.pause(self.id, self.cgroup)
            except BaseException as error:
                if self.init.state == "pausing":
                    self.init.move("not paused")
                if self.suspended and not suspended_before:
                    await self._back_after(error)
                raise
            if self.init.state == "pausing":
                self.init.move("paused")
            self._publish("/tasks/paused", events.TaskPaused(container_id=self.id))

    async def _back_after(self, error: BaseException) -> None:
        try:
            await self.operations().unsuspend_if_on_gpu()
        except Exception as second:  # noqa: BLE001  # the first error is what the caller gets
            error.add_note(f"and it stays suspended: {second}")
            self._log.error("task.resume_failed", error=str(second))

    async def resume(self) -> None:
        self.gpu.require("unpause")
        async with self.lock:
            after(self.init.state, "resume")
            await self.runtime.resume(self.id, self.cgroup)
            if self.init.state == "paused":
                self.init.move("resume")
            if self._pause_suspends:
                await self.operations().unsuspend_if_on_gpu()
            self._publish("/tasks/resumed", events.TaskResumed(container_id=self.id))

    async def update(self, resources: bytes) -> None:
        """Apply OCI LinuxResources (JSON)."""
        async with self.lock:
            after(self.init.state, "update")
            await self.runtime.update(self.id, resources)

    # -- Exits ------------------------------------------------------------------------------------------------------

    def _watch(self, process: Process, early: EarlyExits) -> None:
        """Handle the exit of `process` when it comes, or now if it came while the runtime was still at work."""
        if process.pid == 0 or process.exit is not None:
            return
        handle = self._on_init_exit if process is self.init else partial(self._on_exec_exit, process)
        if exit_ := early.take(process.pid):
            handle(exit_)
        else:
            self.children.claim(process.pid, handle)

    def _on_exec_exit(self, process: Process, exit_: Exit) -> None:
        process.end(exit_)
        self._publish_exit(process)
        self._running_execs -= 1
        self._settle()

    def _on_init_exit(self, exit_: Exit) -> None:
        self._init_exit = exit_
        if not self.spec.own_pid_namespace:
            self._in_background(self._kill_rest())  # the kernel kills the rest only with a pid namespace of its own
        if self.init.state in ("paused", "pausing"):
            self._in_background(self.runtime.resume(self.id, self.cgroup))  # the rest of a frozen container cannot die
        self._settle()

    async def _kill_rest(self) -> None:
        try:
            await self.runtime.kill(self.id, 9, all=True)
        except ProcessGone:
            pass

    def _settle(self) -> None:
        """Declare the container stopped once init and every exec have ended: init's exit is the last one."""
        if self._init_exit is None or self._running_execs or self._kills or self.init.exit is not None:
            return
        self._report_oom()
        self._stop_watching_memory()
        self.init.end(self._init_exit)
        self._publish_exit(self.init)

    def _publish_exit(self, process: Process) -> None:
        assert process.exit is not None
        event = events.TaskExit(
            container_id=self.id, id=process.id or self.id, pid=process.pid, exit_status=process.exit.status
        )
        event.exited_at.FromNanoseconds(process.exit.at_ns)
        self._publish("/tasks/exit", event)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._logged(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _logged(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001  # nobody waits for it; the log is the only reader
            self._log.warning("task.cleanup_failed", error=str(error))

    # -- Memory -----------------------------------------------------------------------------------------------------

    def _watch_memory(self) -> None:
        if self.cgroup is None or self._init_exit is not None:
            return
        try:
            self._oom = OomWatch(self.cgroup)
        except OSError as error:
            self._log.warning("oom.unwatched", error=str(error))
            return
        asyncio.get_running_loop().add_reader(self._oom.fileno(), self._report_oom)

    def _report_oom(self) -> None:
        """Publish an OOM kill as soon as the kernel tells, and once more at the exit: the notice may be on its way."""
        if self._oom is not None and self._oom.read():
            self._publish("/tasks/oom", events.TaskOOM(container_id=self.id))

    def _stop_watching_memory(self) -> None:
        if self._oom is not None:
            asyncio.get_running_loop().remove_reader(self._oom.fileno())
            self._oom.close()
            self._oom = None


@contextmanager
def _quoted(stdio: Stdio) -> Iterator[None]:
    """Add to a failure what the runtime has written in place of the process, unless the failure says it already."""
    try:
        yield
    except Exception as error:
        words = str(error)
        if lines := [line for line in stdio.unheard().splitlines() if line.strip() not in words]:
            error.add_note("it wrote: " + "\n".join(lines))
        raise


def _cgroup_of(pid: int) -> Cgroup | None:
    """Return the cgroup of a process, None when it has ended already."""
    try:
        return Cgroup.of(pid)
    except (ProcessLookupError, FileNotFoundError):
        return None
