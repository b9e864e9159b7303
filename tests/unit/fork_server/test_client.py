"""The client of the fork server: it prints what it is told, and whatever the other side does, the call is done once."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kybernate_shim.fork_server import client
from kybernate_shim.fork_server.client import TAKEN, UNLIKE, NoServer, NotDone, ask

START = ["-namespace", "ns", "-id", "c1", "start"]
DELETE = ["-namespace", "ns", "-id", "c1", "delete"]
Body = Callable[[socket.socket], None]


class Servers:
    """Forked processes that behave as `body` says; the last one's pid is `pid`, and `said` is what it has reported."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._report, self._reporter = os.pipe()
        self.pid = 0

    def fork(self, body: Body) -> None:
        """Listen, and do `body` with the first caller; returns when it listens."""
        heard, tell = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                    listener.bind(str(self._path))
                    listener.listen()
                    os.close(tell)
                    body(listener.accept()[0])
            finally:
                os._exit(0)
        os.close(tell)
        os.read(heard, 1)
        os.close(heard)

    def report(self, words: bytes) -> None:
        os.write(self._reporter, words)

    def said(self) -> bytes:
        assert select.select([self._report], [], [], 10)[0], "the server has said nothing"
        return os.read(self._report, 1 << 16)

    def killed(self) -> bool:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) == -signal.SIGKILL

    def close(self) -> None:
        os.close(self._report)
        os.close(self._reporter)


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    monkeypatch.chdir(tmp_path)  # a socket's address has 108 bytes
    monkeypatch.setattr(client, "socket_path", lambda: "s")
    monkeypatch.setattr(client, "PATIENCE", {"start": (0.3, 0.3), "delete": (0.3, 0.3)})
    made = Servers(Path("s"))
    yield made
    made.close()


def answering(status: int, text: bytes, *, then: Body = lambda connection: None) -> Body:
    def body(connection: socket.socket) -> None:
        connection.send(b"%d" % os.getpid())
        connection.recv(1000)
        connection.send(bytes([status]) + text)
        then(connection)

    return body


def hang(connection: socket.socket) -> None:
    time.sleep(1000)


def test_nobody_listens_is_told_apart(servers: Servers) -> None:
    with pytest.raises(NoServer):
        ask(START)


def test_address_is_printed_and_the_daemon_hears_that_it_was_taken(
    servers: Servers, capfd: pytest.CaptureFixture[str]
) -> None:
    servers.fork(answering(0, b"unix:///x", then=lambda connection: servers.report(connection.recv(100))))
    assert ask(START) == 0
    assert capfd.readouterr().out == "unix:///x"
    assert servers.said() == TAKEN


def test_reason_of_a_failure_is_printed_as_an_error(servers: Servers, capfd: pytest.CaptureFixture[str]) -> None:
    servers.fork(
        answering(1, b"no memory\n", then=lambda connection: servers.report(connection.recv(100) or b"nothing"))
    )
    assert ask(START) == 1
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "no memory\n")
    assert servers.said() == b"nothing"


def test_words_and_standard_descriptors_arrive(servers: Servers) -> None:
    def body(connection: socket.socket) -> None:
        connection.send(b"%d" % os.getpid())
        words, descriptors, _, _ = socket.recv_fds(connection, 1000, 3)
        same = [os.path.sameopenfile(theirs, ours) for ours, theirs in enumerate(descriptors)]
        servers.report(repr((words, same)).encode())

    servers.fork(body)
    with pytest.raises(NotDone):
        ask(DELETE)
    assert servers.said() == repr((b"\0".join(word.encode() for word in DELETE), [True] * 3)).encode()


def test_client_that_cannot_be_imitated_does_its_work_itself(
    servers: Servers, capfd: pytest.CaptureFixture[str]
) -> None:
    servers.fork(answering(UNLIKE, b"another mount namespace"))
    with pytest.raises(NotDone, match="another mount namespace"):
        ask(START)
    assert capfd.readouterr().out == ""


def test_server_that_dies_before_it_forks_was_none(servers: Servers) -> None:
    servers.fork(lambda connection: None)
    with pytest.raises(NoServer):
        ask(START)


def test_death_of_the_process_that_works_is_noticed(servers: Servers) -> None:
    servers.fork(lambda connection: answer_pid_and_exit(connection))
    with pytest.raises(NotDone):
        ask(START)


def answer_pid_and_exit(connection: socket.socket) -> None:
    connection.send(b"%d" % os.getpid())
    connection.recv(1000)


def test_process_that_hangs_at_work_is_dead_before_the_client_goes_on(servers: Servers) -> None:
    def body(connection: socket.socket) -> None:
        answer_pid_and_exit(connection)
        hang(connection)

    servers.fork(body)
    with pytest.raises(NotDone, match="in time"):
        ask(DELETE)
    assert servers.killed()


def test_server_that_does_not_fork_is_dead_for_the_next_start_to_find_a_new_one(servers: Servers) -> None:
    servers.fork(hang)
    with pytest.raises(NotDone, match="in time"):
        ask(START)
    assert servers.killed()


def test_process_that_comes_too_late_cannot_begin(servers: Servers) -> None:
    def body(connection: socket.socket) -> None:
        time.sleep(0.8)
        try:
            connection.send(b"%d" % os.getpid())
            servers.report(b"began")
        except BrokenPipeError:
            servers.report(b"did not begin")

    servers.fork(body)
    with pytest.raises(NotDone, match="in time"):
        ask(DELETE)
    assert servers.said() == b"did not begin"
    assert not servers.killed()


def test_pid_that_comes_in_the_last_moment_is_that_of_a_dead_process(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was sent, but not read before the client's patience ended: whoever sent it may be at work."""

    def impatient(connection: socket.socket) -> int:
        select.select([connection], [], [], 10)
        raise TimeoutError

    def body(connection: socket.socket) -> None:
        answer_pid_and_exit(connection)
        hang(connection)

    monkeypatch.setattr(client, "_read_pid", impatient)
    servers.fork(body)
    with pytest.raises(NotDone, match="in time"):
        ask(DELETE)
    assert servers.killed()
