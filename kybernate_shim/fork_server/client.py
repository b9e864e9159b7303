"""The client: hands one call of the binary to the fork server, and is sure that it is done once or not at all.

It imports nothing but what every interpreter has loaded or built in, for it runs twice per container. One connection is
one call, and one packet is one message:

    server: the pid of the process that will do it
    client: the words of the command line, with descriptors 0, 1 and 2
    server: an exit status, and what is to be printed
    client: TAKEN, after a `start` that succeeded; the daemon ends if it never comes

Whatever goes wrong, the caller does the work itself. Nothing may then be left of what the other side has begun: it
works only if it could send its pid here, and a process whose pid is here and that does not answer is killed. A server
that does not even fork is killed, too, for the next call to find a new one. Descriptors are sent to a known process
only: those in a queue that nobody reads would keep containerd waiting for the end of our output.
"""

import posix
import sys
from _socket import (
    AF_UNIX,
    SCM_RIGHTS,
    SHUT_RD,
    SO_PEERCRED,
    SOCK_SEQPACKET,
    SOL_SOCKET,
    socket,
)

from kybernate_shim.fork_server.place import socket_path

# Seconds until the pid comes, and until the work is done. containerd gives `delete` five seconds in all.
PATIENCE = {"start": (5.0, 20.0), "delete": (1.5, 4.8)}
LARGEST_ANSWER = 1 << 16
CREDENTIALS_BYTES = 12
MSG_DONTWAIT = 0x40
TAKEN = b"taken"
UNLIKE = 255  # in place of an exit status: the forked process could not be made what this one is
SIGKILL = 9


class NoServer(Exception):
    """Nobody listens: there is no fork server, or it died before it took the call."""


class NotDone(Exception):
    """The call was not answered, and nothing of it is left. The message says why."""


def ask(argv: list[str]) -> int:
    """Let the fork server do what `argv`, which ends in start or delete, says; print its answer, return its status.

    Raises NoServer or NotDone.
    """
    connection, server = connect()
    pid = 0
    try:
        first, whole = PATIENCE[argv[-1]]
        connection.settimeout(first)
        pid = _read_pid(connection)
        connection.settimeout(whole)
        send_call(connection, argv)
        answer = connection.recv(LARGEST_ANSWER)
        if not answer:
            raise NotDone("the process that the fork server has forked ended")
        status, text = answer[0], answer[1:]
        if status == UNLIKE:
            raise NotDone(text.decode())
        if argv[-1] == "start" and not status:
            connection.send(TAKEN)
    except TimeoutError:
        if not (_stop(connection, pid) or argv[-1] == "delete"):
            _kill(server)
        raise NotDone("the fork server did not answer in time") from None
    except OSError as error:
        raise NotDone(f"the fork server was lost: {error}") from None
    finally:
        connection.close()
    posix.write(2 if status else 1, text)
    return status


def connect() -> tuple[socket, int]:
    """Return a connection, and the pid of the server."""
    connection = socket(AF_UNIX, SOCK_SEQPACKET)
    try:
        connection.connect(socket_path())
        credentials = connection.getsockopt(SOL_SOCKET, SO_PEERCRED, CREDENTIALS_BYTES)
        server, user = (int.from_bytes(credentials[at : at + 4], sys.byteorder) for at in (0, 4))
        if user != posix.geteuid():
            raise NotDone("a stranger listens in the fork server's place")
    except OSError as error:
        connection.close()
        raise NoServer(str(error)) from None
    except NotDone:
        connection.close()
        raise
    return connection, server


def _read_pid(connection: socket) -> int:
    """Return the pid of the process that does the call. Raises NoServer, TimeoutError."""
    try:
        said = connection.recv(LARGEST_ANSWER)
    except TimeoutError:
        raise
    except OSError as error:
        raise NoServer(str(error)) from None
    if not said:
        raise NoServer("the fork server ended")
    return int(said)


def send_call(connection: socket, argv: list[str]) -> None:
    """Send the words of the command line, and our standard descriptors."""
    words = b"\0".join(word.encode(errors="surrogateescape") for word in argv)
    standard = b"".join(fd.to_bytes(4, sys.byteorder) for fd in (0, 1, 2))
    connection.sendmsg([words], [(SOL_SOCKET, SCM_RIGHTS, standard)])


def _stop(connection: socket, pid: int) -> bool:
    """Make sure that nobody goes on with this call, and tell whether somebody had begun.

    Once the reading end is shut, the pid cannot be sent any more; if it has been, it is here. Its process lives: it has
    the connection's other end open.
    """
    connection.shutdown(SHUT_RD)
    if not pid:
        try:
            pid = int(connection.recv(LARGEST_ANSWER, MSG_DONTWAIT) or 0)
        except BlockingIOError:
            pass
    if pid:
        _kill(pid)
    return bool(pid)


def _kill(pid: int) -> None:
    """End a process and wait until it is gone, with all that it has locked or listened at."""
    from select import poll  # here, for this is a rare end
    from signal import pidfd_send_signal

    try:
        process = posix.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        pidfd_send_signal(process, SIGKILL)
        ended = poll()
        ended.register(process)
        ended.poll()
    except ProcessLookupError:
        pass
    finally:
        posix.close(process)
