"""The daemon: one event loop that serves a pod's containers until containerd shuts it down."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from kybernate_shim.config import Config, ConfigInvalid
from kybernate_shim.imports import import_rest, is_complete
from kybernate_shim.invocation import Invocation
from kybernate_shim.linux.children import Children
from kybernate_shim.linux.prctl import become_subreaper, set_process_name
from kybernate_shim.logs import Log, open_log
from kybernate_shim.task.events import Forwarder, Publisher
from kybernate_shim.task.service import SERVICES, TaskService
from kybernate_shim.task.shim_service import ShimService
from kybernate_shim.trust.caller import OWN_SERVICE
from kybernate_shim.ttrpc import Server

PROCESS_NAME = "kybernate-shim"  # the kernel keeps 15 bytes
FLUSH_SECONDS = 10.0
ANSWER_SECONDS = 1.0  # in which events are to arrive before Shutdown is answered; containerd waits for three
UNWANTED_SECONDS = 5.0  # between two looks for containers
UNWANTED_LOOKS, CONNECTED_LOOKS = 2, 6  # without one, until the daemon ends, and while a client is connected
IMPORT_SECONDS = 2.0


def serve(invocation: Invocation, listener: socket.socket, path: Path, *, ready: Callable[[], None]) -> int:
    """Serve on `listener`, whose file is `path`, until Shutdown or SIGTERM; call `ready` once calls are answered.

    Runs in the first container's bundle, which vanishes before the pod does: nothing here relies on it later.
    Returns the exit status.
    """
    set_process_name(PROCESS_NAME)
    become_subreaper()
    config = _config()
    log = open_log(
        Path("log").absolute(),
        config.log_file,
        level="debug" if invocation.debug else config.log_level,
        namespace=invocation.namespace,
        shim=invocation.id,
        shim_pid=os.getpid(),
    )
    os.chdir("/")
    return asyncio.run(Daemon(invocation, path, log).run(listener, ready))


def _config() -> Config:
    """Return the node's settings. Wrong ones must not keep the daemon from coming up: each Create reports them."""
    try:
        return Config.load()
    except ConfigInvalid:
        return Config()


class Daemon:
    """Wires the parts together and ends them in order."""

    def __init__(self, invocation: Invocation, path: Path, log: Log) -> None:
        self._path = path
        self._alone = {"without_fork_server": why} if (why := invocation.without_server) else {}
        self._log = log
        self._forwarder = Forwarder(os.environ.get("TTRPC_ADDRESS", ""), invocation.namespace)
        self._publisher = Publisher(invocation.namespace, self._forwarder, log)
        self._children = Children()
        self._over = asyncio.Event()
        self._ending = asyncio.Lock()
        self._service = TaskService(
            invocation.namespace,
            self._children,
            self._publisher.publish,
            log,
            self._shut_down,
            f"unix://{path}",
        )
        methods = self._service.methods()
        self._server = Server(
            {**dict.fromkeys(SERVICES, methods), OWN_SERVICE: ShimService(self._service).methods()},
            on_error=lambda call, error: log.error("call.failed", method=call.method, error=str(error)),
        )

    async def run(self, listener: socket.socket, ready: Callable[[], None]) -> int:
        loop = asyncio.get_running_loop()
        self._children.attach(loop)
        loop.add_signal_handler(signal.SIGTERM, self._terminated)
        loop.add_signal_handler(signal.SIGINT, self._terminated)
        loop.add_signal_handler(signal.SIGUSR1, self._dump_tasks)
        await self._server.start(listener)
        ready()
        self._log.info("shim.started", **self._alone)
        waiting = [loop.create_task(work) for work in (self._end_if_unwanted(), self._import_rest())]
        await self._over.wait()
        for task in waiting:
            task.cancel()
        await self._server.close()
        if not await self._publisher.flush(FLUSH_SECONDS):
            self._log.error("event.dropped", error=f"containerd did not accept all events in {FLUSH_SECONDS:g} s")
        await self._forwarder.close()
        return 0

    async def _end_if_unwanted(self) -> None:
        """End a daemon that has had no container for a while: containerd has forgotten it.

        It does so where it fails, or where its client gives up, between `start` and Create, between Delete and
        Shutdown, or in a Create that succeeds here after all. Not immediately while a client is connected, because a
        busy node may be slow. containerd forgets connections, too.
        """
        empty = 0
        while empty < (CONNECTED_LOOKS if self._server.connected else UNWANTED_LOOKS):
            await asyncio.sleep(UNWANTED_SECONDS)
            empty = 0 if self._service.containers or self._service.creating else empty + 1
        self._log.warning("shim.not_used", error="it has no container, and containerd did not end it")
        await self._shut_down()

    async def _import_rest(self) -> None:
        """Import what the first containers of a node did not wait for, once they have been started, and tidy up."""
        await asyncio.sleep(IMPORT_SECONDS)
        if not is_complete():
            await asyncio.to_thread(import_rest)
        from kybernate_shim.linux.file_pages import let_go

        let_go()

    async def _shut_down(self) -> None:
        """Free the address before the caller is answered: the pod's next container must not find a dying daemon.

        Once only, because the path may belong to a successor later. The last line of the log comes before the answer,
        too: with it, containerd closes the connection, and then the FIFO.
        """
        async with self._ending:
            if self._over.is_set():
                return
            self._path.unlink(missing_ok=True)
            await self._server.stop_accepting()
            await self._publisher.flush(ANSWER_SECONDS)
            self._log.info("shim.ended")
            self._over.set()

    def _terminated(self) -> None:
        """An administrator ends the daemon; containers keep running, and containerd will clean up after it."""
        self._log.warning("shim.terminated", tasks=len(self._service.containers))
        asyncio.get_running_loop().create_task(self._shut_down())

    def _dump_tasks(self) -> None:
        for task in asyncio.all_tasks():
            text = io.StringIO()
            task.print_stack(file=text)
            self._log.info("shim.stack_dumped", stack=text.getvalue())
