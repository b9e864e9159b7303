"""A daemon's life in small, for the fork server to go through before it forks: served, called, failed, shut down.

An interpreter adapts its code to what it works on, and fills caches, in the first runs of every function. What has
happened in the fork server has happened for all daemons, and they share the pages where it shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import tempfile
from pathlib import Path

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message

from kybernate_shim.invocation import Invocation
from kybernate_shim.linux.cgroups import Cgroup
from kybernate_shim.linux.mounts import unmount_tree
from kybernate_shim.logs import open_log
from kybernate_shim.messages import runc_options_pb2 as runc
from kybernate_shim.messages import task_pb2 as wire
from kybernate_shim.messages.any import pack
from kybernate_shim.oci.select import VARIABLE
from kybernate_shim.serve import Daemon
from kybernate_shim.task.service import SERVICES
from kybernate_shim.ttrpc import Client, RpcError

RUNTIME = "/bin/true"  # creates nothing, so that the container's creation ends halfway and is undone
ID = "rehearsal"
DEADLINE = 5.0
CONFIG = {
    "ociVersion": "1.0.2",
    "process": {"args": ["true"], "cwd": "/", "env": ["PATH=/bin"]},
    "annotations": {"io.kubernetes.cri.sandbox-id": ID},
    "linux": {"cgroupsPath": f"/{ID}", "namespaces": [{"type": "pid"}, {"type": "mount"}]},
}


def rehearse(times: int) -> None:
    """Go through it so often. Nothing of it is left, whether it goes well or not."""
    os.environ.pop(VARIABLE, None)  # which would win over our options; a daemon gets its client's environment anyway
    with contextlib.suppress(Exception), tempfile.TemporaryDirectory() as directory:
        for number in range(times):
            bundle = Path(directory) / str(number)
            bundle.mkdir()
            _live(bundle)


def _live(bundle: Path) -> None:
    (bundle / "config.json").write_text(json.dumps(CONFIG))
    path = bundle / "s"
    log = open_log(bundle / "none", None, debug=False, namespace=ID, shim=ID, shim_pid=0)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        asyncio.run(_serve_and_call(Daemon(Invocation(namespace=ID, id=ID), path, log), listener, path))


async def _serve_and_call(daemon: Daemon, listener: socket.socket, path: Path) -> None:
    ready = asyncio.Event()
    async with asyncio.timeout(DEADLINE):
        calls = asyncio.create_task(_call(path, ready))
        await daemon.run(listener, ready.set)
        await calls


async def _call(path: Path, ready: asyncio.Event) -> None:
    await ready.wait()
    client = await Client.connect(str(path))
    options = pack(runc.Options(binary_name=RUNTIME, root=str(path.parent / "runc")))
    create = wire.CreateTaskRequest(id=ID, bundle=str(path.parent), options=options)
    calls: list[tuple[str, Message, type[Message]]] = [
        ("Create", create, wire.CreateTaskResponse),
        ("State", wire.StateRequest(id=ID), wire.StateResponse),
        ("Connect", wire.ConnectRequest(id=ID), wire.ConnectResponse),
        ("Shutdown", wire.ShutdownRequest(id=ID), Empty),
    ]
    for method, request, reply in calls:
        with contextlib.suppress(RpcError, ConnectionError):
            await client.call(SERVICES[0], method, request, reply)
    with contextlib.suppress(OSError):
        Cgroup.of(os.getpid())
    await asyncio.to_thread(unmount_tree, path.parent / "rootfs")  # by a thread that ends with the event loop
    await client.close()
