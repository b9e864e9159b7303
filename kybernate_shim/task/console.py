"""The console socket: how an OCI runtime hands over the master side of the terminal that it made for a process.

The runtime connects and sends one message whose SCM_RIGHTS carries the descriptor.
Source: runc's docs/terminals.md, "Detached".
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

from kybernate_shim.linux.private_files import make_directory
from kybernate_shim.linux.readiness import until_readable

LONGEST_PATH = 107  # bytes in sockaddr_un.sun_path, less its NUL
LARGEST_SIZE = 0xFFFF  # struct winsize has unsigned shorts
MESSAGE_BYTES = 4096  # the payload is the terminal's name, which is not needed


class ConsoleSocket:
    """A listening socket in a directory that only root may enter. `path` goes to the runtime's --console-socket."""

    def __init__(self, parent: Path) -> None:
        """Bind below `parent`, made where it is missing. Raises OSError for a path that is too long."""
        self._directory = parent / f"pty-{os.urandom(8).hex()}"
        self.path = self._directory / "s"
        if len(os.fsencode(self.path)) > LONGEST_PATH:
            raise OSError(f"console socket {self.path}: the path is longer than {LONGEST_PATH} bytes")
        make_directory(parent)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        try:
            self._directory.mkdir(mode=0o700)
            self._listener.bind(str(self.path))
            self._listener.listen(1)
        except BaseException:
            self.close()
            raise

    async def receive(self, timeout: float) -> int:
        """Return the terminal's master, non-blocking, and close the socket: it serves one process.

        Raises OSError after `timeout` seconds, or when what arrives is not a terminal.
        """
        try:
            async with asyncio.timeout(timeout):
                connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)
                with connection:
                    await until_readable(connection.fileno())
                    master = _receive_fd(connection)
        except TimeoutError:
            raise OSError(f"the runtime sent no terminal to {self.path} within {timeout:g} s") from None
        finally:
            self.close()
        os.set_blocking(master, False)
        return master

    def close(self) -> None:
        """Remove socket and directory. Idempotent."""
        self._listener.close()
        self.path.unlink(missing_ok=True)
        try:
            self._directory.rmdir()
        except FileNotFoundError:
            pass


def set_size(master: int, width: int, height: int) -> None:
    """Set the size of a terminal in characters; its foreground processes get SIGWINCH."""
    rows, columns = min(height, LARGEST_SIZE), min(width, LARGEST_SIZE)
    ioctl(master, TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def _receive_fd(connection: socket.socket) -> int:
    _, fds, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 1)
    if not fds:
        raise OSError("the runtime's message on the console socket carried no descriptor")
    os.set_inheritable(fds[0], False)
    if not os.isatty(fds[0]):
        os.close(fds[0])
        raise OSError("the descriptor that the runtime sent is not a terminal")
    return fds[0]
