"""A rehearsal of a daemon's life for the fork server, before it forks: a container from Create to Delete.

In the first runs of every function, an interpreter adapts its code to the data, and fills caches. Done in the fork
server, this is done for all daemons, which share the pages concerned.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message

from kybernate_shim.actions import required
from kybernate_shim.address import exclusive, group_of, listen
from kybernate_shim.linux.mount.rootfs import unmount_tree
from kybernate_shim.linux.prctl import PR_SET_CHILD_SUBREAPER, become_subreaper, prctl
from kybernate_shim.linux.temporary_directory import scratch_directory
from kybernate_shim.logs import open_log
from kybernate_shim.messages import event_service_pb2 as events
from kybernate_shim.messages import runc_options_pb2 as runc
from kybernate_shim.messages import task_pb2 as wire
from kybernate_shim.messages.any import pack
from kybernate_shim.oci import exec_fifo
from kybernate_shim.oci.select import VARIABLE
from kybernate_shim.serve import Daemon
from kybernate_shim.task.events import SERVICE as EVENTS
from kybernate_shim.task.service import SERVICES
from kybernate_shim.ttrpc import Call, Client, Method, RpcError, Server

# What stands in for runc: its containers are a process that waits, first for its start. An exec outlives it, as runc's.
RUNTIME = """#!/bin/sh
for word; do
    case $before in
    --root) root=$word ;;
    --pid-file) file=$word ;;
    esac
    before=$word
done
case " $* " in
*" create "*)
    state=$root/$word
    mkdir -p "$state"
    mkfifo "$state/exec.fifo"
    (echo 0 >"$state/exec.fifo"; exec sleep 60) &
    echo "{\\"init_process_pid\\":$!,\\"poststart\\":null}" >"$state/state.json"
    echo $! >"$file"
    ;;
*" exec "*)
    sleep 0.05 &
    echo $! >"$file"
    ;;
esac
"""
ID, EXEC = "warm-up", "exec"
DEADLINE = 5.0
CONFIG = {
    "ociVersion": "1.0.2",
    "process": {"args": ["true"], "cwd": "/", "env": ["PATH=/bin", "HOME=/root"]},
    "root": {"path": "rootfs"},
    "annotations": {"io.kubernetes.cri.sandbox-id": ID, "io.kubernetes.cri.container-type": "sandbox"},
    "mounts": [
        {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec"]},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
    ],
    "linux": {
        "cgroupsPath": f"/{ID}",
        "namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "network", "path": "/proc/1/ns/net"}],
        "devices": [{"path": "/dev/null", "type": "c", "major": 1, "minor": 3}],
    },
}
PROCESS = AnyMessage(value=json.dumps(CONFIG["process"]).encode())
ARGV = ("-namespace", ID, "-address", "/none", "-publish-binary", "containerd", "-id", ID, "start")

Reply = TypeVar("Reply", bound=Message)


def warm_up(times: int) -> int:
    """Rehearse so many times, and return how many succeeded. Nothing is left in any case.

    Where a node has no room, processes or time for it, it is skipped, which is not an error. Other failures are raised.
    """
    well = 0
    with contextlib.suppress(OSError), scratch_directory("kybernate-") as directory, _of_its_own(directory):
        for number in range(times):
            bundle = directory / str(number)
            bundle.mkdir()
            well += _live(bundle)
            gc.collect()  # or each rehearsal would take memory of its own
    return well


@contextmanager
def _of_its_own(directory: Path) -> Iterator[None]:
    """Act as a daemon for the runtime in `directory`, isolated from containerd; then restore the process's state."""
    runtime = directory / "runc"
    runtime.write_text(RUNTIME)
    runtime.chmod(0o700)
    before, magic = dict(os.environ), exec_fifo.MAGIC
    exec_fifo.MAGIC = b"#!"  # this script starts no container otherwise than runc
    os.environ[VARIABLE] = str(runtime)
    os.environ["TTRPC_ADDRESS"] = str(directory / "events")
    become_subreaper()
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0)
        exec_fifo.MAGIC = magic
        os.environ.clear()
        os.environ.update(before)


def _live(bundle: Path) -> bool:
    (bundle / "config.json").write_text(json.dumps(CONFIG))
    invocation = required(ARGV)
    path = bundle / group_of(bundle / "config.json", invocation.id)
    with exclusive(bundle):
        listener = listen(path)
    assert listener is not None
    log = open_log(bundle / "none", None, level="info", namespace=ID, shim=ID, shim_pid=0)
    with listener:
        return asyncio.run(_serve_and_call(Daemon(invocation, path, log), listener, path))


async def _serve_and_call(daemon: Daemon, listener: socket.socket, path: Path) -> bool:
    ready = asyncio.Event()
    async with asyncio.timeout(DEADLINE), _containerd(Path(os.environ["TTRPC_ADDRESS"])):
        calls = asyncio.create_task(_call(path, ready))
        await daemon.run(listener, ready.set)
        return await calls


@contextlib.asynccontextmanager
async def _containerd(path: Path) -> AsyncIterator[None]:
    """Receive a daemon's events in containerd's place."""

    async def forward(request: events.ForwardRequest, call: Call) -> Empty:
        return Empty()

    server = Server({EVENTS: {"Forward": Method(events.ForwardRequest, forward)}})
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        await server.start(listener)
        try:
            yield
        finally:
            await server.close()
            path.unlink()


async def _call(path: Path, ready: asyncio.Event) -> bool:
    """Act as the daemon's client, and return whether the container started and ended."""
    await ready.wait()
    client = await Client.connect(str(path))

    async def call(method: str, request: Message, reply: type[Reply]) -> Reply | None:
        with contextlib.suppress(RpcError, ConnectionError):
            return await client.call(SERVICES[0], method, request, reply)
        return None

    with _output(path.parent / "stdout") as stdout, _output(path.parent / "stderr") as stderr:
        options = pack(runc.Options(root=str(path.parent / "runc")))
        create = wire.CreateTaskRequest(
            id=ID, bundle=str(path.parent), options=options, stdout=str(stdout), stderr=str(stderr)
        )
        created = await call("Create", create, wire.CreateTaskResponse)
        await call("Connect", wire.ConnectRequest(id=ID), wire.ConnectResponse)
        await call("Start", wire.StartRequest(id=ID), wire.StartResponse)
        await call("State", wire.StateRequest(id=ID), wire.StateResponse)
        await call("Exec", wire.ExecProcessRequest(id=ID, exec_id=EXEC, spec=PROCESS), Empty)
        await call("Start", wire.StartRequest(id=ID, exec_id=EXEC), wire.StartResponse)
        await call("Wait", wire.WaitRequest(id=ID, exec_id=EXEC), wire.WaitResponse)
        await call("Delete", wire.DeleteRequest(id=ID, exec_id=EXEC), wire.DeleteResponse)
        ended = None
        if created is not None and created.pid:
            os.kill(created.pid, signal.SIGKILL)
            await call("Wait", wire.WaitRequest(id=ID), wire.WaitResponse)
            ended = await call("Delete", wire.DeleteRequest(id=ID), wire.DeleteResponse)
        await call("Shutdown", wire.ShutdownRequest(id=ID), Empty)
    await asyncio.to_thread(unmount_tree, path.parent / "rootfs")  # by a thread that ends with the event loop
    await client.close()
    return ended is not None


@contextmanager
def _output(path: Path) -> Iterator[Path]:
    """Read a container's output where the daemon is to write it, as containerd does."""
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield path
    finally:
        os.close(reader)
