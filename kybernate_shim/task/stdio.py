"""The stdio of one process: what the OCI runtime gets as descriptors 0, 1 and 2, and where the bytes go.

Create and Exec bring strings; `open_stdio` turns them into descriptors for the runtime, and copies on the daemon's
event loop once the process exists. Input and output survive clients that leave and come back; the end of the output
reaches the client immediately, because it waits for that before it calls Delete.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kybernate_shim.linux.children import Children
from kybernate_shim.logs import Log
from kybernate_shim.run_directory import RUN
from kybernate_shim.task.console import ConsoleSocket, set_size
from kybernate_shim.task.destination import STDERR, STDOUT, Destination, plan_outputs
from kybernate_shim.task.ends import CLIENT_SECONDS, End, open_input, open_output
from kybernate_shim.task.logger import Logger
from kybernate_shim.task.pump import Pump

STDIN = 0
STREAMS = {STDIN: "stdin", STDOUT: "stdout", STDERR: "stderr"}
CONSOLE_SECONDS = 10.0
PIPE_BYTES = 64 * 1024
UNHEARD_BYTES = 4096  # enough for an error message
READ_SECONDS = 1.0  # in which a client that reads gets new output, on a busy machine
FIRST_LOOK, LAST_LOOK = 0.0002, 0.005  # seconds between two looks whether it has


@dataclass(frozen=True)
class StdioConfig:
    """The strings of Create or Exec, verbatim: State gives them back to clients that attach."""

    stdin: str
    stdout: str
    stderr: str
    terminal: bool


@dataclass(frozen=True)
class PipeOwner:
    """The ids, as the host sees them, that own a process's pipes, so that it may reopen /dev/stdout."""

    uid: int = 0
    gid: int = 0


async def open_stdio(
    config: StdioConfig,
    *,
    children: Children,
    container: str,
    namespace: str,
    log: Log,
    uid: int = 0,
    gid: int = 0,
    runtime_dir: Path = RUN,
    piped: Collection[int] = (),
    client_seconds: float = CLIENT_SECONDS,
) -> Stdio:
    """Open everything that `config` names and return what the runtime needs.

    `uid` and `gid` own the pipes. `piped` names streams that get a pipe although `config` has no path for them: input
    is then at its end, and output is discarded. A restore needs that for streams that were pipes at the dump.
    `client_seconds` is how long to wait, per FIFO, for the client to open its end of the output.
    Raises Invalid, OSError; nothing stays open then.
    """
    plan = plan_outputs(config.stdout, config.stderr, terminal=config.terminal)
    stdio = TerminalStdio(log, runtime_dir) if config.terminal else PipeStdio(log, PipeOwner(uid, gid))
    with ExitStack() as undo:
        undo.callback(stdio.close)
        if config.stdin:
            stdio.add_stdin(open_input(config.stdin))
        if any(destination.kind == "binary" for destination in plan.values()):
            stdio.add_logger(
                await Logger.start(plan[STDOUT], children=children, container=container, namespace=namespace, log=log)
            )
        else:
            await _add_outputs(stdio, plan, client_seconds)
        stdio.add_missing(piped)
        undo.pop_all()
    return stdio


async def _add_outputs(stdio: Stdio, plan: Mapping[int, Destination], client_seconds: float) -> None:
    opened: dict[Destination, End] = {}
    for number, destination in plan.items():
        if destination in opened:
            stdio.add_output(number, opened[destination].duplicate())
        else:
            opened[destination] = await open_output(destination, client_seconds=client_seconds)
            stdio.add_output(number, opened[destination])


class Stdio(ABC):
    """Stdio of a process from before it exists until it is deleted. Made by `open_stdio`.

    `fds` maps 0, 1 and 2 to the descriptors for the runtime's create, exec or restore; a number that is missing means
    /dev/null. With a terminal it is empty and `console_socket` is the path for --console-socket.
    """

    def __init__(self, log: Log) -> None:
        self.fds: dict[int, int] = {}
        self.console_socket: Path | None = None
        self._log = log
        self._owned = ExitStack()
        self._input: End | None = None
        self._outputs: list[Pump] = []
        self._logger: Logger | None = None
        self._running = False

    @abstractmethod
    def add_stdin(self, client: End) -> None:
        """Take the client's input; from now on it is closed with this object, as in every other add_ method."""

    @abstractmethod
    def add_output(self, number: int, client: End) -> None:
        """Send output stream `number` to `client`."""

    @abstractmethod
    def add_logger(self, logger: Logger) -> None:
        """Send all output to a logger program."""

    @abstractmethod
    def add_missing(self, piped: Collection[int]) -> None:
        """Add pipes for those of the streams `piped` that have none so far."""

    @abstractmethod
    async def started(self) -> None:
        """Begin to copy, now that the runtime has returned and the process holds its own descriptors.

        Closes the process's ends here, which would otherwise hide its end. Raises OSError, after which everything is
        released.
        """

    @abstractmethod
    def resize(self, width: int, height: int) -> None:
        """Set the terminal's size in characters, now or as soon as there is one; ignored without a terminal."""

    def unheard(self) -> str:
        """Return, once, the end of what was written to the streams before `started`: by the runtime, if it failed."""
        return ""

    def close_stdin(self) -> None:
        """Let the process see the end of its input once the last client has closed it too. Idempotent.

        May come at any time, also before `started`.
        """
        if self._input:
            self._input.let_go()

    async def drained(self, timeout: float | None) -> bool:
        """Wait until all output has reached its destination; return False when it has not after `timeout` seconds.

        None means any time.
        """
        if not self._running:
            return True
        try:
            async with asyncio.timeout(timeout):
                for pump in self._outputs:
                    await pump.ended.wait()
                if self._logger:
                    await self._logger.ended()
        except TimeoutError:
            return False
        return True

    def reader_is_behind(self) -> bool:
        """Return whether a client is about to read output that is in its FIFO, see `READ_SECONDS`."""
        return self._running and any(pump.reader_is_behind(READ_SECONDS) for pump in self._outputs)

    async def read(self) -> None:
        """Wait until clients have read what is in their FIFOs, but no longer than `READ_SECONDS`."""
        pause = FIRST_LOOK
        with suppress(TimeoutError):
            async with asyncio.timeout(READ_SECONDS):
                while self.reader_is_behind():
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LAST_LOOK)

    def close(self) -> None:
        """Release everything, output that is still being copied included. Idempotent."""
        self._owned.close()

    def _own(self, end: End) -> End:
        self._owned.callback(end.close)
        return end

    def _pump_input(self, source: End, sink: End) -> Pump:
        pump = Pump(source, sink, log=self._log.bind(stream="stdin"), keep_draining=False)
        self._owned.callback(pump.stop)
        return pump

    def _pump_output(self, number: int, source: End, sink: End) -> Pump:
        pump = Pump(source, sink, log=self._log.bind(stream=STREAMS[number]), keep_draining=True)
        self._owned.callback(pump.stop)
        self._outputs.append(pump)
        return pump


class PipeStdio(Stdio):
    """A pipe for every stream; each has one end in the process and one here, or in a logger program."""

    def __init__(self, log: Log, owner: PipeOwner) -> None:
        super().__init__(log)
        self._owner = owner
        self._theirs: list[End] = []  # what the process gets
        self._pumps: list[Pump] = []

    def add_stdin(self, client: End) -> None:
        self._input = self._own(client)
        read, write = self._pipe()
        os.set_blocking(write.fd, False)
        self._hand_over(STDIN, read)
        self._pumps.append(self._pump_input(client, write))

    def add_output(self, number: int, client: End) -> None:
        self._own(client)
        read, write = self._pipe()
        os.set_blocking(read.fd, False)
        self._hand_over(number, write)
        self._pumps.append(self._pump_output(number, read, client))

    def add_logger(self, logger: Logger) -> None:
        self._logger = logger
        self._owned.callback(logger.stop)
        for number, end in logger.ends.items():
            self._hand_over(number, end)

    def add_missing(self, piped: Collection[int]) -> None:
        for number in set(piped) - set(self.fds):
            if number == STDIN:
                read, write = self._pipe()
                self._hand_over(STDIN, read)
                write.close()
            else:
                self.add_output(number, End(os.open(os.devnull, os.O_WRONLY)))

    async def started(self) -> None:
        self.fds = {}
        for end in self._theirs:
            end.close()
        self._running = True
        for pump in self._pumps:
            pump.start()

    def unheard(self) -> str:
        said = b""
        for pump in [] if self._running else self._outputs:
            with suppress(OSError):  # there is nothing, or it is closed
                said += os.read(pump.source.fd, PIPE_BYTES)
        return said[-UNHEARD_BYTES:].decode(errors="replace").strip()

    def resize(self, width: int, height: int) -> None:
        pass

    def _pipe(self) -> tuple[End, End]:
        read, write = os.pipe()
        return self._own(End(read)), self._own(End(write))

    def _hand_over(self, number: int, end: End) -> None:
        if self._owner != PipeOwner():
            os.fchown(end.fd, self._owner.uid, self._owner.gid)
        self.fds[number] = end.fd
        self._theirs.append(end)


class TerminalStdio(Stdio):
    """One terminal for all streams; the runtime makes it, and its master comes through the console socket."""

    def __init__(self, log: Log, runtime_dir: Path) -> None:
        super().__init__(log)
        self._socket = ConsoleSocket(runtime_dir)
        self._owned.callback(self._socket.close)
        self.console_socket = self._socket.path
        self._output: End | None = None
        self._console: End | None = None
        self._size: tuple[int, int] | None = None

    def add_stdin(self, client: End) -> None:
        self._input = self._own(client)

    def add_output(self, number: int, client: End) -> None:
        self._output = self._own(client)

    def add_logger(self, logger: Logger) -> None:
        self._logger = logger
        self._owned.callback(logger.stop)
        logger.ends[STDERR].close()  # a terminal has one stream
        self._output = logger.ends[STDOUT]
        os.set_blocking(self._output.fd, False)

    def add_missing(self, piped: Collection[int]) -> None:
        if not self._output:  # a terminal has to be read, or the process stops when its buffer is full
            self._output = self._own(End(os.open(os.devnull, os.O_WRONLY)))

    async def started(self) -> None:
        assert self._output is not None
        try:
            self._console = self._own(End(await self._socket.receive(CONSOLE_SECONDS)))
            output = self._pump_output(STDOUT, self._own(self._console.duplicate()), self._output)
            if self._input:
                typed = self._pump_input(self._input, self._own(self._console.duplicate()))
                output.on_end = typed.stop
                typed.start()
        except BaseException:
            self.close()
            raise
        if self._size:
            set_size(self._console.fd, *self._size)
        self._running = True
        output.start()

    def resize(self, width: int, height: int) -> None:
        self._size = width, height
        if self._console and self._console.is_open:
            set_size(self._console.fd, width, height)


@contextmanager
def quoted(stdio: Stdio) -> Iterator[None]:
    """Add to a failure what the runtime has written in place of the process, unless the failure has it already."""
    try:
        yield
    except Exception as error:
        words = str(error)
        if lines := [line for line in stdio.unheard().splitlines() if line.strip() not in words]:
            error.add_note("it wrote: " + "\n".join(lines))
        raise
