"""A logger program of the user's own, which containerd names by a `binary://` URI.

It gets the process's output as descriptors 3 (stdout) and 4 (stderr), closes 5 or writes to it when it is ready, and
ends when both outputs do. Its environment is the container's id and namespace, nothing else.
Source: containerd's core/runtime/v2/README.md, "Logging".
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import ExitStack

from kybernate_shim.linux.children import Child, Children, Exit
from kybernate_shim.linux.process import has_ended
from kybernate_shim.linux.readiness import until_readable
from kybernate_shim.logs import Log
from kybernate_shim.task.destination import STDERR, STDOUT, Destination
from kybernate_shim.task.ends import End

READY_SECONDS = 10.0
TERM_SECONDS = 12.0  # containerd's own shim gives a logger this long
FDS = {STDOUT: 3, STDERR: 4}
READY_FD = 5


class Logger:
    """A running logger. `ends` are the pipes into it by stream; they block, as a process expects of its stdio."""

    def __init__(self, child: Child, ends: dict[int, End], log: Log) -> None:
        self.ends = ends
        self._child = child
        self._log = log
        self._stopping = False
        child.exited.add_done_callback(self._on_exit)

    @classmethod
    async def start(
        cls,
        destination: Destination,
        *,
        children: Children,
        container: str,
        namespace: str,
        log: Log,
        timeout: float = READY_SECONDS,
    ) -> Logger:
        """Start the program and return once it is ready. Raises OSError; nothing is left of it then."""
        argv = [destination.path, *destination.arguments]
        environment = {"CONTAINER_ID": container, "CONTAINER_NAMESPACE": namespace}
        ends: dict[int, End] = {}
        with ExitStack() as undo:
            with ExitStack() as handed_over:
                ready, theirs = _open_pipe(undo, handed_over)
                fds = {READY_FD: theirs.fd}
                for number, fd in FDS.items():
                    theirs, ends[number] = _open_pipe(handed_over, undo)
                    fds[fd] = theirs.fd
                try:
                    child = children.spawn(argv, env=environment, fds=fds)
                except OSError as error:
                    raise OSError(f"logger {destination.path}: {error.strerror}") from error
            logger = cls(child, ends, log)
            undo.callback(logger.kill)
            await _until_ready(ready.fd, child, destination.path, timeout)
            undo.pop_all()
        ready.close()
        return logger

    async def ended(self) -> None:
        """Wait for the program's end: only then is all output written."""
        await asyncio.shield(self._child.exited)

    def stop(self) -> None:
        """Close the outputs and ask the program to end; kill it 12 seconds later. Idempotent, does not wait."""
        self._close_ends()
        if not self._stopping and not self._child.exited.done():
            self._stopping = True
            self._child.kill(signal.SIGTERM)
            killer = asyncio.get_running_loop().call_later(TERM_SECONDS, self._child.kill)
            self._child.exited.add_done_callback(lambda _: killer.cancel())

    def kill(self) -> None:
        """Close the outputs and end the program without notice."""
        self._stopping = True
        self._close_ends()
        self._child.kill()

    def _close_ends(self) -> None:
        for end in self.ends.values():
            end.close()

    def _on_exit(self, exited: asyncio.Future[Exit]) -> None:
        if not exited.cancelled() and not self._stopping and exited.result().status:
            self._log.error("logger.exited", pid=self._child.pid, status=exited.result().status)


def _open_pipe(reading: ExitStack, writing: ExitStack) -> tuple[End, End]:
    """Return a pipe whose ends are closed with one stack each."""
    read, write = map(End, os.pipe())
    reading.callback(read.close)
    writing.callback(write.close)
    return read, write


async def _until_ready(fd: int, child: Child, path: str, timeout: float) -> None:
    try:
        async with asyncio.timeout(timeout):
            await until_readable(fd)
    except TimeoutError:
        raise OSError(f"logger {path}: not ready after {timeout:g} s; it was killed") from None
    # A closed descriptor means ready, but the kernel also closes it for a program that dies, after it has marked it.
    if not os.read(fd, 1) and has_ended(child.pid):
        status = (await asyncio.shield(child.exited)).status
        if status:  # 0: it may have left a daemon behind
            raise OSError(f"logger {path}: ended before it was ready, status {status}")
