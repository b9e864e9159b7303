"""The Task service: each call looks up, delegates and answers. v2 and v3 differ by their name only.

Errors of the inner modules become RPC codes here and nowhere else. Code UNIMPLEMENTED is never sent for a call that
exists: containerd would conclude that the protocol is older, and repeat the Create.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message

from kybernate_shim.config import Config
from kybernate_shim.deleted import leave_answer
from kybernate_shim.linux.children import Children
from kybernate_shim.linux.mount.rootfs import Mount
from kybernate_shim.live_config import LiveConfig
from kybernate_shim.logs import Log
from kybernate_shim.messages import events_pb2 as events
from kybernate_shim.messages import process_pb2 as status
from kybernate_shim.messages import runc_options_pb2 as runc
from kybernate_shim.messages import task_pb2 as wire
from kybernate_shim.messages.any import pack
from kybernate_shim.oci.bundle import Bundle
from kybernate_shim.task import room
from kybernate_shim.task.codes import KINDS, rpc_error, task_error
from kybernate_shim.task.container import Container, Publish
from kybernate_shim.task.prepare import prepare
from kybernate_shim.task.process import Process
from kybernate_shim.task.stdio import StdioConfig
from kybernate_shim.trace import step, traced
from kybernate_shim.trust.caller import CALLER, called_by
from kybernate_shim.ttrpc import Call, Code, Method, RpcError

SERVICES = ("containerd.task.v2.Task", "containerd.task.v3.Task")
GO_ZERO_SECONDS = -62135596800  # Go's zero time, which is the exit time of a running process

STATUS = {
    "created": status.CREATED, "restorable": status.CREATED, "running": status.RUNNING, "pausing": status.PAUSING,
    "paused": status.PAUSED, "held": status.RUNNING, "stopped": status.STOPPED, "deleted": status.STOPPED,
}  # fmt: skip

Request = TypeVar("Request", bound=Message)


@dataclass
class TaskService:
    """All containers of one daemon. `shut_down` is called once, when containerd has no more use for it.

    `address` is where the daemon listens, as `start` has answered.
    """

    namespace: str
    children: Children
    publish: Publish
    log: Log
    shut_down: Callable[[], Awaitable[None]]
    address: str = ""
    containers: dict[str, Container] = field(default_factory=dict)
    creating: dict[str, asyncio.Event] = field(default_factory=dict)  # set when that has ended

    def __post_init__(self) -> None:
        self.settings = LiveConfig(self.log)

    def methods(self) -> dict[str, Method]:
        """Return the handler table, for either name of the service."""
        table: dict[str, tuple[type[Message], Callable[[Any], Awaitable[Message]]]] = {
            "State": (wire.StateRequest, self.state),
            "Create": (wire.CreateTaskRequest, self.create),
            "Start": (wire.StartRequest, self.start),
            "Delete": (wire.DeleteRequest, self.delete),
            "Pids": (wire.PidsRequest, self.pids),
            "Pause": (wire.PauseRequest, self.pause),
            "Resume": (wire.ResumeRequest, self.resume),
            "Checkpoint": (wire.CheckpointTaskRequest, self.checkpoint),
            "Kill": (wire.KillRequest, self.kill),
            "Exec": (wire.ExecProcessRequest, self.exec),
            "ResizePty": (wire.ResizePtyRequest, self.resize_pty),
            "CloseIO": (wire.CloseIORequest, self.close_io),
            "Update": (wire.UpdateTaskRequest, self.update),
            "Wait": (wire.WaitRequest, self.wait),
            "Stats": (wire.StatsRequest, self.stats),
            "Connect": (wire.ConnectRequest, self.connect),
            "Shutdown": (wire.ShutdownRequest, self.shutdown),
        }
        return {
            name: Method(request, translated(handle, self.log, task_error), cancellable=name == "Wait")
            for name, (request, handle) in table.items()
        }

    # -- Life -------------------------------------------------------------------------------------------------------

    async def create(self, request: wire.CreateTaskRequest) -> wire.CreateTaskResponse:
        if request.id in self.containers or request.id in self.creating:
            raise RpcError(Code.ALREADY_EXISTS, f"container {request.id}: already exists")
        ended = self.creating[request.id] = asyncio.Event()
        bundle = Bundle(Path(request.bundle))
        try:
            bundle.complete(self.address)
            container = await prepare(
                request,
                namespace=self.namespace,
                config=Config.load(),
                children=self.children,
                publish=self.publish,
                log=self.log,
            )
            step("prepared")
            mounts = [Mount(mount.type, mount.source, mount.options, mount.target) for mount in request.rootfs]
            await container.create(mounts, _created(request, str(container.image.path) if container.image else ""))
            self.containers[request.id] = container
        except BaseException:
            bundle.forget_records()
            raise
        finally:
            del self.creating[request.id]
            ended.set()
        self.log.info("task.created", task=request.id, pid=container.init.pid)
        return wire.CreateTaskResponse(pid=container.init.pid)

    async def start(self, request: wire.StartRequest) -> wire.StartResponse:
        container = self.container(request.id)
        if request.exec_id:
            return wire.StartResponse(pid=await container.execs.start(request.exec_id))
        await room.take(container.spec, container.namespace, container.id)
        pid = await container.start()
        self.log.info("task.started", task=request.id, pid=pid)
        return wire.StartResponse(pid=pid)

    async def delete(self, request: wire.DeleteRequest) -> wire.DeleteResponse:
        """Delete a container or an exec. It waits for a Create that still runs, on which its client has given up.

        containerd forgets the container with this answer, and does not try twice to end a daemon that it believes to be
        empty.
        """
        if not request.exec_id and (creating := self.creating.get(request.id)) is not None:
            await creating.wait()
        container = self.container(request.id)
        if request.exec_id:
            return _deleted(await container.execs.delete(request.exec_id))
        init = await container.delete()
        self.containers.pop(request.id, None)
        reply = _deleted(init)
        container.bundle.forget_records()
        try:
            leave_answer(container.bundle.path, reply.SerializeToString())
        except OSError:
            pass  # a full disk: `delete` will find out by itself that nothing is left
        self.publish(
            "/tasks/delete",
            events.TaskDelete(
                container_id=request.id, pid=reply.pid, exit_status=reply.exit_status, exited_at=reply.exited_at
            ),
        )
        self.log.info("task.deleted", task=request.id, pid=init.pid, status=reply.exit_status)
        return reply

    async def exec(self, request: wire.ExecProcessRequest) -> Empty:
        stdio = StdioConfig(request.stdin, request.stdout, request.stderr, request.terminal)
        self.container(request.id).execs.add(request.exec_id, stdio, request.spec.value)
        return Empty()

    async def kill(self, request: wire.KillRequest) -> Empty:
        await self.container(request.id).kill(request.exec_id, request.signal, all=request.all)
        return Empty()

    async def pause(self, request: wire.PauseRequest) -> Empty:
        await self.container(request.id).pausing.pause()
        return Empty()

    async def resume(self, request: wire.ResumeRequest) -> Empty:
        await self.container(request.id).pausing.resume()
        return Empty()

    async def checkpoint(self, request: wire.CheckpointTaskRequest) -> Empty:
        container = self.container(request.id)
        from kybernate_shim.task.checkpointing import from_containerd, work_directory  # most are never checkpointed

        work = work_directory(container.config, self.namespace, request.id, "checkpoint")
        await container.checkpoint(from_containerd(request, spec=container.spec, config=container.config, work=work))
        return Empty()

    async def update(self, request: wire.UpdateTaskRequest) -> Empty:
        await self.container(request.id).update(request.resources.value)
        return Empty()

    async def resize_pty(self, request: wire.ResizePtyRequest) -> Empty:
        self._process(request.id, request.exec_id).resize(request.width, request.height)
        return Empty()

    async def close_io(self, request: wire.CloseIORequest) -> Empty:
        if request.stdin:
            self._process(request.id, request.exec_id).close_stdin()
        return Empty()

    # -- Looking ----------------------------------------------------------------------------------------------------

    async def state(self, request: wire.StateRequest) -> wire.StateResponse:
        container = self.container(request.id)
        process = container.process(request.exec_id)
        state = process.state
        if process.id and state == "running" and container.init.state in ("pausing", "paused"):
            state = container.init.state  # a frozen container freezes its execs
        reply = wire.StateResponse(
            id=process.id or container.id,
            bundle=str(container.bundle.path),
            pid=process.pid,
            status=STATUS[state],
            stdin=process.stdio_config.stdin,
            stdout=process.stdio_config.stdout,
            stderr=process.stdio_config.stderr,
            terminal=process.stdio_config.terminal,
        )
        _put_exit(reply, process)
        return reply

    async def wait(self, request: wire.WaitRequest) -> wire.WaitResponse:
        process = self._process(request.id, request.exec_id)
        await process.wait()
        reply = wire.WaitResponse()
        _put_exit(reply, process)
        return reply

    async def pids(self, request: wire.PidsRequest) -> wire.PidsResponse:
        container = self.container(request.id)
        execs = container.execs.running()
        reply = wire.PidsResponse()
        for pid in await container.pids():
            info = reply.processes.add(pid=pid)
            if pid in execs:
                info.info.CopyFrom(pack(runc.ProcessDetails(exec_id=execs[pid])))
        return reply

    async def stats(self, request: wire.StatsRequest) -> wire.StatsResponse:
        container = self.container(request.id)
        try:
            if container.cgroup is not None and container.cgroup.exists:
                return wire.StatsResponse(stats=pack(container.cgroup.stats()))
        except FileNotFoundError:
            pass  # it was removed meanwhile
        raise RpcError(Code.NOT_FOUND, f"cgroup of container {request.id}: not found")

    async def connect(self, request: wire.ConnectRequest) -> wire.ConnectResponse:
        container = self.containers.get(request.id)
        return wire.ConnectResponse(shim_pid=os.getpid(), task_pid=container.init.pid if container else 0)

    async def shutdown(self, request: wire.ShutdownRequest) -> Empty:
        """End the daemon, unless other containers of the pod live in it."""
        if not self.containers and not self.creating:
            await self.shut_down()
        return Empty()

    # ---------------------------------------------------------------------------------------------------------------

    def container(self, id: str) -> Container:
        """Return the container of that id, with the settings of this moment. Raises RpcError NOT_FOUND."""
        try:
            container = self.containers[id]
        except KeyError:
            raise RpcError(Code.NOT_FOUND, f"container {id}: not found") from None
        container.configure(self.settings.read())
        return container

    def _process(self, id: str, exec_id: str) -> Process:
        return self.container(id).process(exec_id)


def translated(
    handle: Callable[[Any], Awaitable[Message]], log: Log, coded: Callable[[Exception], RpcError] = rpc_error
) -> Callable[[Any, Call], Awaitable[Message]]:
    """Map errors of the inner modules to RPC codes by `coded`, and `log` the call's steps if it is to be traced.

    An error of a kind that codes.py does not know is UNKNOWN, and logged.
    """

    async def answer(request: Any, call: Call) -> Message:
        try:
            CALLER.set(called_by(call))  # for this call's task alone
            with traced(call.method, log):
                return await handle(request)
        except Exception as error:
            answer = coded(error)
            if answer.code is Code.UNKNOWN and not isinstance(error, KINDS):
                log.error("call.failed", method=call.method, error=answer.message)
            raise answer from error

    return answer


def _created(request: wire.CreateTaskRequest, checkpoint: str) -> events.TaskCreate:
    event = events.TaskCreate(container_id=request.id, bundle=request.bundle, checkpoint=checkpoint)
    event.rootfs.extend(request.rootfs)
    event.io.stdin, event.io.stdout, event.io.stderr = request.stdin, request.stdout, request.stderr
    event.io.terminal = request.terminal
    return event


def _deleted(process: Process) -> wire.DeleteResponse:
    reply = wire.DeleteResponse(pid=process.pid)
    _put_exit(reply, process)
    return reply


def _put_exit(reply: wire.StateResponse | wire.DeleteResponse | wire.WaitResponse, process: Process) -> None:
    if process.exit is None:
        reply.exited_at.seconds = GO_ZERO_SECONDS
    else:
        reply.exit_status = process.exit.status
        reply.exited_at.FromNanoseconds(process.exit.at_ns)
