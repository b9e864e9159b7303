"""One process that containerd knows: a container's init, or an exec in it."""

from __future__ import annotations

import asyncio

from kybernate_shim.linux.children import Exit
from kybernate_shim.task.lifecycle import InvalidMove, after
from kybernate_shim.task.stdio import Stdio, StdioConfig


class Process:
    """State, pid, stdio and end of a process. `id` is empty for init, the exec id otherwise.

    `pid` and `exit` keep their values after the end: containerd asks for the pid of processes that are gone.
    """

    def __init__(self, id: str, stdio_config: StdioConfig, *, state: str = "created") -> None:
        self.id = id
        self.stdio_config = stdio_config
        self.stdio: Stdio | None = None
        self.state = state
        self.pid = 0
        self.exit: Exit | None = None
        self.reaped = False  # it has ended, although that may not be published yet
        self._ended = asyncio.Event()
        self._stdin_closed = False
        self._size: tuple[int, int] | None = None  # of the terminal

    def move(self, verb: str) -> None:
        """Take one step in the table of lifecycle.py. Raises Refused."""
        self.state = after(self.state, verb)

    def end(self, exit_: Exit) -> None:
        """Record the end; State says STOPPED before any Wait returns."""
        self.move("exit")
        self.reaped = True
        self.exit = exit_
        self._ended.set()

    def start_failed(self) -> None:
        """End the waits for a process that did not start. It stays created, and can be started again or deleted."""
        self._ended.set()

    async def wait(self) -> Exit | None:
        """Return how it ended, once it has; None when it could not be started."""
        await self._ended.wait()
        return self.exit

    def close_stdin(self) -> None:
        """Let the process see the end of its input; remembered where there is no stdio yet."""
        self._stdin_closed = True
        if self.stdio is not None:
            self.stdio.close_stdin()

    def resize(self, width: int, height: int) -> None:
        """Set the size of the terminal, if it has one; remembered where there is no stdio yet.

        containerd's CRI passes the client's size on as soon as it has it, which may be before an exec is started.
        Raises InvalidMove for an exec that has ended; for init that is no error, as with containerd's own shim.
        """
        if self.id and self.exit is not None:
            raise InvalidMove("cannot resize a stopped container")  # in the words of containerd's own shim
        self._size = width, height
        if self.stdio is not None:
            self.stdio.resize(width, height)

    def adopt(self, stdio: Stdio) -> None:
        """Take the stdio that was opened for this process."""
        self._ended.clear()  # an earlier start may have failed
        self.reaped = False
        self.stdio = stdio
        if self._stdin_closed:
            stdio.close_stdin()
        if self._size is not None:
            stdio.resize(*self._size)

    async def drain(self, seconds: float | None) -> bool:
        """Wait until all output has reached the client; return False when it has not after `seconds`, None for any."""
        return self.stdio is None or await self.stdio.drained(seconds)

    @property
    def reader_is_behind(self) -> bool:
        """Whether a client is about to read output of this process that is in its FIFO."""
        return self.stdio is not None and self.stdio.reader_is_behind()

    async def read(self) -> None:
        """Wait for that client, but not for long."""
        if self.stdio is not None:
            await self.stdio.read()

    def release(self) -> None:
        """Close the stdio. Idempotent."""
        if self.stdio is not None:
            self.stdio.close()
