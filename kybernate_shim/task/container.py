"""A container: its init, its execs, and the order of calls that change them.

One lock per container orders the calls that change it. Calls that only read (State, Wait, Pids, Stats, Connect) and
Kill take no lock: they are answered during a checkpoint of minutes.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from kybernate_shim.config import Config, ConfigInvalid
from kybernate_shim.errors import Missing, Refused
from kybernate_shim.linux.cgroup.cgroup import Cgroup
from kybernate_shim.linux.children import KILLED, Children, EarlyExits, Exit
from kybernate_shim.linux.mount.rootfs import Mount
from kybernate_shim.logs import Log
from kybernate_shim.messages import events_pb2 as events
from kybernate_shim.oci.bundle import Bundle
from kybernate_shim.oci.options import RuntimeOptions, effective_config
from kybernate_shim.oci.runtime import Runtime
from kybernate_shim.oci.select import GPU_RUNTIME
from kybernate_shim.oci.spec import Spec
from kybernate_shim.run_directory import turn_file
from kybernate_shim.task.cleanup_records import CleanupRecords
from kybernate_shim.task.execs import Execs
from kybernate_shim.task.exits import Exits
from kybernate_shim.task.gpu_states import GpuStates
from kybernate_shim.task.killing import Killing
from kybernate_shim.task.lifecycle import after
from kybernate_shim.task.oom_reports import OomReports
from kybernate_shim.task.pausing import Pausing
from kybernate_shim.task.process import Process
from kybernate_shim.task.rootfs import Rootfs
from kybernate_shim.task.stdio import Stdio, StdioConfig, open_stdio, quoted
from kybernate_shim.trace import step
from kybernate_shim.undo import AsyncUndo

if TYPE_CHECKING:
    from kybernate_shim.checkpoint.dump_request import Dumped, DumpRequest
    from kybernate_shim.checkpoint.gpu.left import ArenaUse, Left
    from kybernate_shim.checkpoint.image.manifest import Manifest
    from kybernate_shim.checkpoint.image.store import Image
    from kybernate_shim.checkpoint.operation import Operation
    from kybernate_shim.task.operations import Operations
    from kybernate_shim.task.outcomes import Ledger
    from kybernate_shim.task.runs import PodRuns

Publish = Callable[[str, Message], None]
LAST_EXIT_SECONDS = 5.0


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
        runs: PodRuns | None = None,
    ) -> None:
        self.id = id
        self.namespace = namespace
        self.bundle = bundle
        self.spec = spec
        self.options = options
        self.config = config
        self.runtime = runtime
        self.image = image
        self._runs = runs
        self._began_ns = 0  # UNIX time, as of exits
        self.children = children
        self.lock = asyncio.Lock()
        self.gpu = GpuStates(id)
        self._node_config: Config | None = None  # that `config` follows
        self.init = Process("", stdio, state="restorable" if image else "created")
        self.cgroup: Cgroup | None = None
        self.publish = publish
        self.log = log.bind(task=id)
        self._rootfs = Rootfs(bundle.rootfs, children)
        self._oom = OomReports(id, publish, self.log)
        self.exits = Exits(self, self._oom)
        self.execs = Execs(self)
        self.cleanup = CleanupRecords(self)
        self.pausing = Pausing(self)
        self.killing = Killing(self)
        self._operations: Operations | None = None

    @property
    def init_pid(self) -> int:
        return self.init.pid

    @property
    def came_from(self) -> Manifest | None:
        """The image that it is restored from, None where it is started."""
        return self.image.manifest if self.image is not None else None

    def configure(self, node: Config) -> None:
        """Adopt the node's settings, which a call has found changed, unless an operation runs."""
        if node is self._node_config or self.lock.locked():
            return
        self._node_config = node
        try:
            self.config = self.config.replaced_by(effective_config(node, self.options))
        except ConfigInvalid as error:  # with the container's own options
            self.log.error("config.rejected", error=str(error), state="the previous settings stay in use")
            return
        if self.runtime.deadlines != self.config.deadlines:
            self.runtime = replace(self.runtime, deadlines=self.config.deadlines)

    async def create(self, mounts: list[Mount], event: events.TaskCreate) -> None:
        """Mount the rootfs and let the runtime create init; undo all of it when a step fails.

        A container that is created from a checkpoint is only prepared: its processes come at Start, because containerd
        still changes its files in between.
        """
        async with AsyncUndo() as undo:
            self._rootfs.mounts = mounts
            if mounts:
                undo.push_async_callback(self._rootfs.unmount)
                await self._rootfs.mount()
                step("mounted")
            self.init.adopt(await self.open_stdio(self.init))
            step("stdio opened")
            undo.callback(self.init.release)
            if self.image is None:
                undo.push_async_callback(self._forget_in_runtime)
                undo.callback(self._oom.stop)
                await self._create_init(event)
            else:
                self.publish("/tasks/create", event)
            undo.pop_all()

    async def _create_init(self, event: events.TaskCreate) -> None:
        assert self.init.stdio is not None
        with quoted(self.init.stdio), self.children.early_exits() as early:
            await self.runtime.create(
                self.id,
                self.bundle,
                fds=self.init.stdio.fds,
                console_socket=self.init.stdio.console_socket,
                options=self.options,
            )
            step("runtime created")
            if self.runtime.cli.binary.name == GPU_RUNTIME:
                self.spec = Spec.read(self.bundle.path)  # it has added mounts and devices
            await self.init.stdio.started()
            self.find_init()
            event.pid = self.init.pid
            self._watch_memory()  # before it starts: it may run out of memory within milliseconds
            step("cgroup found")
            self.cleanup.record_phase("idle")
            step("recorded")
            self.publish("/tasks/create", event)
            self.exits.watch(self.init, early)

    async def delete(self) -> Process:
        """Remove the container that has ended or was never started, and return its init.

        Raises Refused while it runs, and MountFailed when the rootfs is still in use: the container then stays
        known, so that the call can be repeated. It ends a running restore, as with a SIGKILL, which may take minutes.
        """
        if self.init.pid == 0:
            self.abort_operation()
        async with self.lock:
            after(self.init.state, "delete")
            if self.init.state == "stopped":
                await self.drain(self.init)
                step("output drained")
                self._thaw()
                await self._remember_run()
            await self._forget_in_runtime(force=False)
            step("runtime deleted")
            await self._await_last_exit()
            self.init.release()
            if self._rootfs.mounts:
                await self._rootfs.unmount()
                step("unmounted")
            if self.parked_bytes:
                await asyncio.to_thread(self.operations().discard)
            turn_file(self.namespace, self.id).unlink(missing_ok=True)
            self.init.move("delete")
            return self.init

    async def _remember_run(self) -> None:
        """Record the run for the next container of its name in the pod, which its client creates after this delete."""
        if self._runs is None or not self._began_ns or self.init.exit is None:
            return
        from kybernate_shim.checkpoint.image.starts import Run  # few containers ask for an image

        seconds = max(0, self.init.exit.at_ns - self._began_ns) / 1e9
        try:
            await asyncio.to_thread(self._runs.add, Run(self.came_from.id if self.came_from else "", seconds))
        except (OSError, Refused) as error:
            self.log.warning("runs.not_kept", error=str(error))

    def _thaw(self) -> None:
        """Thaw the cgroup of an ended container, so that it does not look paused.

        On cgroup v2, a frozen init can be killed, which runc does not notice.
        """
        if self.cgroup is not None:
            with suppress(OSError):
                self.cgroup.thaw()

    async def _await_last_exit(self) -> None:
        """The runtime kills the init of a container that was never started: let its exit event come first."""
        if self.init.pid and self.init.exit is None:
            try:
                await asyncio.wait_for(self.init.wait(), LAST_EXIT_SECONDS)
            except TimeoutError:
                self.log.warning("exit.lost", pid=self.init.pid)
                self.exits.handle_init(Exit(self.init.pid, KILLED, time.time_ns()))

    async def _forget_in_runtime(self, *, force: bool = True) -> None:
        try:
            await self.runtime.delete(self.id, force=force)
        except Missing:
            pass  # it never got that far, or a checkpoint that ends the container removed it

    async def open_stdio(self, process: Process) -> Stdio:
        return await open_stdio(
            process.stdio_config,
            children=self.children,
            container=self.id,
            namespace=self.namespace,
            uid=self.options.io_uid,
            gid=self.options.io_gid,
            log=self.log,
            piped=self.image.piped_streams() if self.image and process is self.init else (),
        )

    async def start(self) -> int:
        """Let init run, or restore it from its image, and return its pid."""
        async with self.lock:
            after(self.init.state, "start")
            if self.image is not None:
                await self.operations().restore(self.image)
                return self.init.pid
            with self.children.early_exits() as early:
                # From here on, an exit waits in the collector, so that it cannot be published before the start.
                self.children.disclaim(self.init.pid)
                try:
                    await self.runtime.start(self.id, waiting=None if self._is_frozen() else self.init.pid)
                except BaseException:
                    self.exits.watch(self.init, early)
                    raise
                step("runtime started")
                self._announce_start()
                self.exits.watch(self.init, early)
            return self.init.pid

    def _is_frozen(self) -> bool:
        """Return whether the container was frozen from outside, so that it could not start."""
        try:
            return self.cgroup is not None and self.cgroup.frozen
        except OSError:
            return False  # there is nothing to freeze it with

    def find_init(self) -> None:
        """Take over the init that the runtime has made."""
        self.init.pid = self.bundle.init_pid()
        self.cgroup = _cgroup_of(self.init.pid)

    def lose_init(self) -> None:
        """Forget init, after a restore that has failed."""
        self.init.pid, self.cgroup = 0, None
        self.cleanup.record_locked(())

    def restored(self, early: EarlyExits) -> None:
        """Become running: the processes of an image are there."""
        self._announce_start()
        self._watch_memory()
        self.exits.watch(self.init, early)

    def _announce_start(self) -> None:
        self._began_ns = time.time_ns()
        self.init.move("start")
        self.publish("/tasks/start", events.TaskStart(container_id=self.id, pid=self.init.pid))

    def operations(self) -> Operations:
        """Return the object that checkpoints, restores, suspends and resumes this container.

        Loaded on use: most containers are only started, and the first of a node waits for every module.
        """
        if self._operations is None:
            from kybernate_shim.task.operations import Operations

            self._operations = Operations(self, self.log)
        return self._operations

    async def checkpoint(self, request: DumpRequest, operation: str = "") -> tuple[Dumped, Operation]:
        """Write a checkpoint image; the container is as before afterwards, or gone if `request` says so.

        A SIGKILL from `kill` ends the checkpoint, too: a client that kills the container does not want to wait for it.
        """
        self.gpu.require("checkpoint")
        async with self.lock:
            after(self.init.state, "checkpoint")
            return await self.operations().checkpoint(request, operation)

    async def release(self) -> None:
        """Resume the container, which a checkpoint holds. Raises Refused."""
        await self.operations().release()

    @property
    def held_seconds(self) -> float:
        """For how many more seconds it is held, 0 where it is not."""
        held = self._operations.held if self._operations is not None else None
        return held.seconds_left if held is not None else 0.0

    async def suspend(self, *, lock_seconds: float = 0, operation: str = "") -> tuple[Left, Operation]:
        """Move the container's VRAM into host memory; its processes wait for `unsuspend`. Idempotent."""
        self.gpu.require("suspend")
        async with self.lock:
            after(self.init.state, "suspend")
            return await self.operations().suspend(lock_seconds, operation)

    async def park(self, *, operation: str = "") -> tuple[Left, Operation]:
        """Move VRAM that is in host memory to the disk, until `unsuspend`. Idempotent."""
        self.gpu.require("park")
        async with self.lock:
            after(self.init.state, "park")
            return await self.operations().park(operation)

    async def unsuspend(
        self, *, restore_seconds: float = 0, room_seconds: float = 0, operation: str = ""
    ) -> tuple[Left, Operation]:
        """Undo `suspend`, and bring back processes that were left without their GPU by other means."""
        self.gpu.require("resume")
        async with self.lock:
            after(self.init.state, "suspend")
            return await self.operations().unsuspend(restore_seconds, room_seconds, operation)

    @property
    def operation(self) -> Operation | None:
        """The operation that runs now."""
        return self._operations.current if self._operations is not None else None

    @property
    def operation_id(self) -> str:
        """The name of the operation that runs now, or waits for the container to be free; may be empty."""
        return self._operations.running_id if self._operations is not None else ""

    @property
    def ledger(self) -> Ledger | None:
        """How the last operations ended, None before the first."""
        return self._operations.ledger if self._operations is not None else None

    @property
    def in_words(self) -> str:
        """What is true of the container now."""
        away = "on the disk" if self.parked_bytes else "in host memory"
        gpu = {"suspended": f", its VRAM {away}", "stuck": ", processes of it not back on their GPUs"}
        return f"container {self.id} is {self.init.state}{gpu.get(self.gpu.state, '')}"

    @property
    def suspended(self) -> bool:
        """Whether its VRAM is in host memory, by a suspend of ours."""
        return self.gpu.state == "suspended"

    @property
    def arena_use(self) -> ArenaUse | None:
        """What its last suspend has moved into the arena, None before the first."""
        return self._operations.arena_use if self._operations is not None else None

    @property
    def vram_bytes(self) -> int:
        """How much VRAM has left the GPUs by its last suspend, 0 where it is not suspended."""
        return self._operations.vram_bytes if self._operations is not None else 0

    @property
    def parked_bytes(self) -> int:
        """How much of that is on the disk."""
        return self._operations.parked_bytes if self._operations is not None else 0

    def announce(self, topic: str, **labels: str) -> None:
        """Publish an event of ours to subscribers of containerd's; the agent looks at the container again."""
        self.publish(topic, events.ContainerUpdate(id=self.id, labels=labels))

    async def drain(self, process: Process) -> None:
        seconds = self.config.deadlines.io_drain
        if not await process.drain(seconds or None):
            self.log.warning(
                "stdio.abandoned", exec=process.id, error=f"output still open {seconds:g} s after the exit"
            )

    def process(self, exec_id: str) -> Process:
        """Return init for the empty id. Raises Missing."""
        return self.execs.find(exec_id) if exec_id else self.init

    def _watch_memory(self) -> None:
        if self.cgroup is not None and self.exits.of_init is None:
            self._oom.watch(self.cgroup)

    async def pids(self) -> list[int]:
        """Return the pids, on the host, of all processes in the container.

        A container that waits for its restore has none; the daemon's own stands in, because containerd removes tasks
        without a pid when it restarts.
        """
        if self.init.state == "restorable":
            return [os.getpid()]
        return self.cgroup.processes() if self.cgroup is not None else []

    async def kill(self, exec_id: str, signal: int, *, all: bool) -> None:
        """Send `signal` to init or an exec; with `all`, to every process. Raises Missing where none is left."""
        await self.killing.kill(exec_id, signal, all=all)

    def abort_operation(self) -> bool:
        """End what runs and would outlast the container, which is killed; return whether anything does."""
        return self._operations is not None and self._operations.abort()

    async def update(self, resources: bytes) -> None:
        """Apply OCI LinuxResources (JSON)."""
        async with self.lock:
            after(self.init.state, "update")
            await self.runtime.update(self.id, resources)


def _cgroup_of(pid: int) -> Cgroup | None:
    """Return the cgroup of a process, None when it has ended already."""
    try:
        return Cgroup.of(pid)
    except (ProcessLookupError, FileNotFoundError):
        return None
