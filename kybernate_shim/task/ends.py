"""The files that a client names for stdio, opened so that it can detach and attach, and so that no open blocks.

Both ends of every FIFO are held. With one end only, a client that detaches (or containerd, restarting) would give the
process a broken pipe or an end of input, and the bytes in the FIFO would be gone.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import stat
from array import array
from fcntl import ioctl
from pathlib import Path
from termios import FIONREAD

from kybernate_shim.task.destination import Destination

CLIENT_SECONDS = 10.0
FIRST_PAUSE, LAST_PAUSE = 0.001, 0.05  # seconds between looks for the client


class End:
    """A descriptor to copy from or to, and the descriptors that are only held open with it."""

    def __init__(self, fd: int, *held: int) -> None:
        self.fd = fd
        self._held = list(held)
        self.is_open = True

    def duplicate(self) -> End:
        """Return another end on the same files; they are closed when the last duplicate is."""
        return End(os.dup(self.fd), *map(os.dup, self._held))

    def unread(self) -> int:
        """Return how many bytes in the FIFO of an output no client has read; 0 for anything but a FIFO."""
        return readable_bytes(self._held[0]) if self._held else 0

    def has_client(self) -> bool:
        """Return whether a client has the FIFO of an output open. What is in the FIFO stays there.

        The kernel reports a FIFO without a reader, so ours is closed for the check. A FIFO that is both output and
        error has two of ours, and counts as read.
        """
        if not self._held:
            return False
        writer = os.dup(self.fd) if self.is_open else os.open(_link(self._held[0]), os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.close(self._held.pop())
            look = select.poll()
            look.register(writer, 0)
            return not look.poll(0)  # an error is always reported: here, that there is no reader
        finally:
            self._held.append(os.open(_link(writer), os.O_RDONLY | os.O_NONBLOCK))
            os.close(writer)

    def finish(self) -> None:
        """Close the descriptor to write to: a client sees the end. `unread` keeps its meaning."""
        if self.is_open:
            self.is_open = False
            os.close(self.fd)

    def let_go(self) -> None:
        """Close what is only held. Idempotent."""
        while self._held:
            os.close(self._held.pop())

    def close(self) -> None:
        """Close everything. Idempotent."""
        self.let_go()
        self.finish()


def _link(fd: int) -> str:
    """Return the path by which an open file, which may have been removed, can be opened again."""
    return f"/proc/self/fd/{fd}"


def readable_bytes(fd: int) -> int:
    """Return how many bytes a pipe or FIFO holds."""
    count = array("i", [0])
    ioctl(fd, FIONREAD, count)
    return count[0]


def open_input(path: str) -> End:
    """Open the FIFO `path` to read a client's input from; the write end held with it hides clients that leave.

    Raises OSError.
    """
    try:
        if not _is_fifo(path):
            raise OSError(errno.EINVAL, "not a FIFO")
        reader, writer = _open_both(path)
    except OSError as error:
        raise OSError(f"stdin {path}: {error.strerror}") from error
    return End(reader, writer)


async def open_output(destination: Destination, *, client_seconds: float) -> End:
    """Open a "path" or "file" to write a process's output to; the descriptor does not block.

    Waits up to `client_seconds` for the client to open its end of a FIFO, and continues without: output is then kept in
    the FIFO until a client reads it. Raises OSError.
    """
    path = destination.path
    try:
        if destination.kind == "file":
            return _open_log_file(path)
        if not _is_fifo(path):
            return End(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK))
        reader, writer = _open_both(path, await _open_beside_client(path, client_seconds))
    except OSError as error:
        raise OSError(f"output {path}: {error.strerror}") from error
    return End(writer, reader)


def _open_log_file(path: str) -> End:
    Path(path).parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    return End(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o644))


async def _open_beside_client(path: str, seconds: float) -> int | None:
    """Open the FIFO for writing once a client has it open for reading, or is about to; None when there is none.

    Without the wait, the output of a process that ends immediately would be discarded with the last descriptor, before
    a client that is slow to open its end could read it. The descriptor is kept: closing it would end the client's
    stream.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    pause = FIRST_PAUSE
    while True:
        try:
            return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
        if loop.time() >= deadline:
            return None
        await asyncio.sleep(pause)
        pause = min(2 * pause, LAST_PAUSE)


def _open_both(path: str, writer: int | None = None) -> tuple[int, int]:
    """Return a reading and a writing descriptor of a FIFO. The reader goes first: a writer alone is refused."""
    opened = [] if writer is None else [writer]
    try:
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        opened.append(reader)
        return reader, os.open(path, os.O_WRONLY | os.O_NONBLOCK) if writer is None else writer
    except BaseException:
        for fd in opened:
            os.close(fd)
        raise


def _is_fifo(path: str) -> bool:
    return stat.S_ISFIFO(Path(path).stat().st_mode)
