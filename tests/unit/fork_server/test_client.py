"""The client of the fork server: it prints what it is told, and whatever the other side does, the call is done once."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kybernate_shim import launcher
from kybernate_shim.deleted import leave_answer
from kybernate_shim.errors import Refused
from kybernate_shim.fork_server import place
from kybernate_shim.fork_server.answer import TAKEN, UNLIKE
from tests.unit.fork_server.clients import ITSELF, Client, package_in

START = ["-namespace", "ns", "-id", "c1", "start"]
DELETE = ["-namespace", "ns", "-id", "c1", "delete"]
INFO = ["-info"]
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
        if self.pid:
            with suppress(ChildProcessError):  # `killed` has waited for it
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        os.close(self._report)
        os.close(self._reporter)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("client")


@pytest.fixture
def client(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    """A client of little patience, whose server's address is relative: a socket's has 108 bytes."""
    monkeypatch.chdir(tmp_path)
    package = package_in(tmp_path / "lib")
    monkeypatch.setattr(place, "DIRECTORY", ".")
    monkeypatch.setattr(place, "__file__", str(package / "fork_server" / "place.py"))
    return Client(compiled, tmp_path / "lib", Path(), "-DPATIENCE={{300, 300}, {300, 300}, {300, 300}}")


@pytest.fixture
def servers(client: Client) -> Iterator[Servers]:
    made = Servers(Path(place.socket_path()))
    yield made
    made.close()


def itself(client: Client, argv: list[str]) -> str:
    """Let an interpreter do the work, and return why."""
    done = client.ask(argv)
    assert done.returncode == ITSELF, done.stderr
    why, _, words = done.stdout.removeprefix("itself: ").removesuffix("\n").partition(" |")
    assert words.split() == argv
    return why


def answering(status: int, text: bytes, *, then: Body = lambda connection: None) -> Body:
    def body(connection: socket.socket) -> None:
        connection.send(b"%d" % os.getpid())
        connection.recv(1000)
        connection.send(bytes([status]) + text)
        then(connection)

    return body


def hang(connection: socket.socket) -> None:
    time.sleep(1000)


def test_start_that_finds_no_server_leaves_one_and_asks_again(client: Client, servers: Servers) -> None:
    assert itself(client, START).startswith("no fork server: ")
    assert client.left.exists()


@pytest.mark.parametrize("argv", [DELETE, INFO])
def test_other_calls_leave_no_server(client: Client, servers: Servers, argv: list[str]) -> None:
    assert itself(client, argv).startswith("no fork server: ")
    assert not client.left.exists()


def test_info_is_asked_of_the_server(client: Client, servers: Servers) -> None:
    def body(connection: socket.socket) -> None:
        connection.send(b"%d" % os.getpid())
        servers.report(connection.recv(1000))
        connection.send(b"\0")

    servers.fork(body)
    assert client.ask(INFO).returncode == 0
    assert servers.said() == b"-info"


@pytest.mark.parametrize("argv", [["-v"], ["-info=true"], ["-debug", "-info"], []])
def test_rare_command_lines_are_the_interpreters(client: Client, servers: Servers, argv: list[str]) -> None:
    servers.fork(hang)
    assert itself(client, argv) == ""


def test_address_is_printed_and_the_daemon_hears_that_it_was_taken(client: Client, servers: Servers) -> None:
    servers.fork(answering(0, b"unix:///x", then=lambda connection: servers.report(connection.recv(100))))
    done = client.ask(START)
    assert (done.returncode, done.stdout, done.stderr) == (0, "unix:///x", "")
    assert servers.said() == TAKEN


def test_reason_of_a_failure_is_printed_as_an_error(client: Client, servers: Servers) -> None:
    servers.fork(
        answering(1, b"no memory\n", then=lambda connection: servers.report(connection.recv(100) or b"nothing"))
    )
    done = client.ask(START)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "no memory\n")
    assert servers.said() == b"nothing"


def test_words_and_standard_descriptors_arrive(client: Client, servers: Servers, tmp_path: Path) -> None:
    def body(connection: socket.socket) -> None:
        connection.send(b"%d" % os.getpid())
        words, descriptors, _, _ = socket.recv_fds(connection, 1000, 3)
        names = [os.readlink(f"/proc/self/fd/{fd}") for fd in descriptors]  # noqa: PTH115
        servers.report(repr((words, names)).encode())

    servers.fork(body)
    files = [tmp_path / name for name in ("in", "out", "error")]
    files[0].touch()
    with files[0].open() as ours, files[1].open("w") as out, files[2].open("w") as error:
        subprocess.run([client.path, *DELETE], stdin=ours, stdout=out, stderr=error, check=False)
    assert servers.said() == repr((b"\0".join(map(str.encode, DELETE)), [str(path) for path in files])).encode()


def test_client_that_cannot_be_imitated_does_its_work_itself(client: Client, servers: Servers) -> None:
    servers.fork(answering(UNLIKE, b"another mount namespace"))
    assert itself(client, START) == "another mount namespace"


def test_server_that_dies_before_it_forks_was_none(client: Client, servers: Servers) -> None:
    servers.fork(lambda connection: None)
    itself(client, START)
    assert client.left.exists()


def test_death_of_the_process_that_works_is_noticed(client: Client, servers: Servers) -> None:
    servers.fork(lambda connection: answer_pid_and_exit(connection))
    assert "ended" in itself(client, START)
    assert not client.left.exists()


def answer_pid_and_exit(connection: socket.socket) -> None:
    connection.send(b"%d" % os.getpid())
    connection.recv(1000)


def test_process_that_hangs_at_work_is_dead_before_the_client_goes_on(client: Client, servers: Servers) -> None:
    def body(connection: socket.socket) -> None:
        answer_pid_and_exit(connection)
        hang(connection)

    servers.fork(body)
    assert "in time" in itself(client, DELETE)
    assert servers.killed()


def test_server_that_does_not_fork_is_dead_for_the_next_start_to_find_a_new_one(
    client: Client, servers: Servers
) -> None:
    servers.fork(hang)
    assert "in time" in itself(client, START)
    assert servers.killed()


def test_server_that_forks_for_others_lives(client: Client, servers: Servers) -> None:
    def serve_others(connection: socket.socket) -> None:
        while True:
            if os.fork() == 0:
                os._exit(0)
            time.sleep(0.02)

    servers.fork(serve_others)
    assert itself(client, START) == "the fork server did not answer in time"
    assert os.waitpid(servers.pid, os.WNOHANG) == (0, 0)


def test_server_without_a_processor_lives(client: Client, servers: Servers) -> None:
    def wait_for_a_processor(connection: socket.socket) -> None:
        while True:
            pass  # the state is the same

    servers.fork(wait_for_a_processor)
    assert itself(client, START) == "the fork server did not answer in time"
    assert os.waitpid(servers.pid, os.WNOHANG) == (0, 0)


def test_process_that_comes_too_late_cannot_begin(client: Client, servers: Servers) -> None:
    def body(connection: socket.socket) -> None:
        time.sleep(0.8)
        try:
            connection.send(b"%d" % os.getpid())
            servers.report(b"began")
        except BrokenPipeError:
            servers.report(b"did not begin")

    servers.fork(body)
    assert "in time" in itself(client, DELETE)
    assert servers.said() == b"did not begin"
    assert not servers.killed()


IMPATIENT = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>

int poll(struct pollfd *fds, nfds_t count, int timeout)
{
	int (*real)(struct pollfd *, nfds_t, int) = dlsym(RTLD_NEXT, "poll");
	return real(fds, count, timeout < 0 ? -1 : 10000) && timeout < 0;
}
"""


def test_pid_that_comes_in_the_last_moment_is_that_of_a_dead_process(
    client: Client, servers: Servers, tmp_path: Path
) -> None:
    """It was sent, but not read before the client's patience ended: its sender may be at work."""

    def body(connection: socket.socket) -> None:
        answer_pid_and_exit(connection)
        hang(connection)

    source, library = tmp_path / "impatient.c", tmp_path / "impatient.so"
    source.write_text(IMPATIENT)
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True)
    servers.fork(body)
    done = client.ask(DELETE, env={"LD_PRELOAD": str(library)})
    assert "in time" in done.stdout
    assert servers.killed()


@pytest.mark.parametrize("left", [b"\x08\x01", b"\x08\x00\xff" * 100])
def test_delete_of_what_its_daemon_has_deleted_gives_its_answer(client: Client, tmp_path: Path, left: bytes) -> None:
    (tmp_path / "address").write_text(f"unix://{tmp_path}/none")
    leave_answer(tmp_path, left)
    argv = [client.path, "-id", "c1", "-bundle", str(tmp_path), "delete"]
    assert subprocess.run(argv, capture_output=True, check=True).stdout == left


def test_delete_beside_a_dead_daemons_socket_is_more_work(client: Client, servers: Servers, tmp_path: Path) -> None:
    (tmp_path / "address").write_text("unix://dead")
    leave_answer(tmp_path, b"\x08\x01")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind("dead")
    itself(client, ["-id", "c1", "-bundle", str(tmp_path), "delete"])
    with socket.socket(socket.AF_UNIX) as alive:
        Path("dead").unlink()
        alive.bind("dead")
        alive.listen()
        assert client.ask(["-id", "c1", "-bundle", str(tmp_path), "delete"]).stdout == "\x08\x01"


def test_missing_interpreter_is_named(compiled: Path, tmp_path: Path) -> None:
    program = tmp_path / launcher.NAME
    program.write_bytes(launcher.program("/none/python", tmp_path, compiled / "fork_server/client"))
    program.chmod(0o755)
    done = subprocess.run([program, *START], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "cannot run /none/python: No such file or directory" in done.stderr


def test_path_that_does_not_fit_is_refused(client: Client, compiled: Path) -> None:
    with pytest.raises(Refused, match="no place for /x"):
        launcher.program(sys.executable, Path("/" + "x" * 5000), compiled / "fork_server/client")
