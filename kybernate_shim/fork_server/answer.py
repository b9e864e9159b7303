"""Does one call of the binary in a process that was forked for it, which becomes a pod's daemon if that was a start.

client.c explains the protocol between the two.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from kybernate_shim import bootstrap
from kybernate_shim.actions import explained, required, run
from kybernate_shim.bootstrap import protocol_of
from kybernate_shim.errors import Invalid
from kybernate_shim.fork_server.place import PROGRAM
from kybernate_shim.fork_server.process_context import ProcessContext, adopt_context
from kybernate_shim.invocation import Invocation
from kybernate_shim.linux import sealed_program
from kybernate_shim.linux.prctl import set_command_line
from kybernate_shim.linux.process import parent_of
from kybernate_shim.linux.socket_peer import peer_of
from kybernate_shim.start import claim, existing, failure, keep_only, serve_from_here

STANDARD = (0, 1, 2)
LARGEST_ANSWER = 1 << 16
TAKEN = b"taken"
UNLIKE = 255  # in place of an exit status: this process could not be made what the client is


def answer(connection: socket.socket, context: ProcessContext) -> int:
    """Do what the client asks and return this process's exit status; `context` is that of the server.

    The client does the work itself if we cannot.
    """
    try:
        connection.send(b"%d" % os.getpid())
        argv, client = _receive(connection)
    except (OSError, ValueError, ConnectionAbortedError):
        return 1
    if argv[-1] == "start" and (words := _existing(argv, client)) is not None:
        _reply(connection, 0, words)
        _last_word(connection)  # an end before it would look like a failure
        return 0
    try:
        adopt_context(client, context)
        set_command_line([PROGRAM, *argv])  # distinguishes this process in `ps` from those of other containers
    except (ValueError, OSError) as error:
        _reply(connection, UNLIKE, str(error))
        return 1
    if argv[-1] == "start":
        return _start(connection, argv, client)
    status = run(argv)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    _reply(connection, status)
    return 0


def _existing(argv: list[str], client: int) -> str | None:
    """Return the answer with the daemon that the pod has already, None without one.

    To find it, nothing of the client but its directory has to be adopted, and its root must be ours.
    """
    try:
        if not Path(f"/proc/{client}/root").samefile("/"):
            return None
        os.chdir(f"/proc/{client}/cwd")
        invocation = required(argv)
        path = existing(invocation)
        if path is None:
            return None
        return bootstrap.answer(path, protocol_of(parent_of(client), invocation.publish_binary))
    except (Invalid, OSError, ValueError):
        return None  # the slow path will report what is wrong


def _start(connection: socket.socket, argv: list[str], client: int) -> int:
    try:
        invocation = required(argv)
    except Invalid as error:
        _reply(connection, 2, explained(error))
        return 2
    try:
        return _daemon(connection, invocation, parent_of(client))
    except ConnectionAbortedError:
        return 1
    except BaseException as error:  # noqa: BLE001  # a daemon that cannot start must say so to its launcher
        expected = isinstance(error, OSError | ValueError)
        _reply(connection, 1, failure(invocation, str(error) if expected else f"{type(error).__name__}: {error}"))
        return 1


def _daemon(connection: socket.socket, invocation: Invocation, containerd: int) -> int:
    version = protocol_of(containerd, invocation.publish_binary)
    path, listener = claim(invocation)

    def ready() -> None:
        """Answer, and continue only once the answer has arrived: until then the client may do the work itself."""
        _reply(connection, 0, bootstrap.answer(path, version))
        if _last_word(connection) != TAKEN:
            raise ConnectionAbortedError
        connection.close()

    if listener is None:
        ready()
        return 0

    return serve_from_here(invocation, listener, path, containerd=containerd, ready=ready)


def _receive(connection: socket.socket) -> tuple[list[str], int]:
    """Take over the client's standard descriptors, and return its arguments and its pid.

    Raises ConnectionAbortedError.
    """
    words, descriptors, _, _ = socket.recv_fds(connection, LARGEST_ANSWER, len(STANDARD))
    pid = peer_of(connection).pid
    if len(descriptors) != len(STANDARD) or not pid:
        raise ConnectionAbortedError
    for number, fd in enumerate(descriptors):
        os.dup2(fd, number)
    keep_only(connection.fileno(), *sealed_program.descriptors())
    return [os.fsdecode(word) for word in words.split(b"\0")], pid


def _reply(connection: socket.socket, status: int, text: str = "") -> None:
    """Send the answer. Raises ConnectionAbortedError."""
    try:
        connection.send(bytes([status]) + text.encode(errors="replace")[: LARGEST_ANSWER - 1])
    except OSError:
        raise ConnectionAbortedError from None


def _last_word(connection: socket.socket) -> bytes:
    try:
        return connection.recv(len(TAKEN))
    except OSError:
        return b""
