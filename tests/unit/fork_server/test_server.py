"""The fork server: there is one, its daemons are what their clients are, and it ends when it is of no use."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim import address, serve
from kybernate_shim.fork_server import place, server
from kybernate_shim.invocation import Invocation
from kybernate_shim.linux.prctl import prctl
from kybernate_shim.messages.any import pack
from kybernate_shim.messages.runc_options_pb2 import Options
from kybernate_shim.messages.types_pb2 import RuntimeInfo
from tests.unit.fork_server.clients import ITSELF, Client, package_in

START = ["-namespace", "ns", "-id", "c1", "-address", "/run/containerd/containerd.sock", "start"]
PR_SET_NO_NEW_PRIVS = 38
DEADLINE = 40.0


def tell_all(invocation: Invocation, listener: socket.socket, path: Path, *, ready: Callable[[], None]) -> int:
    """Be a daemon that reports to its first caller what it is."""
    ready()
    facts = {
        "pid": os.getpid(), "sid": os.getsid(0), "umask": os.umask(0), "nice": os.nice(0), "parent": os.getppid(),
        "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[0], "environ": dict(os.environ), "cwd": str(Path.cwd()),
        "hangup": str(signal.getsignal(signal.SIGHUP)), "usr2": str(signal.getsignal(signal.SIGUSR2)),
        "pipe": str(signal.getsignal(signal.SIGPIPE)),
        "cmdline": Path("/proc/self/cmdline").read_bytes().decode().split("\0")[:-1],
        "fds": [str(fd.readlink()).partition(":")[0] for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()],
    }  # fmt: skip
    with listener.accept()[0] as caller:
        caller.sendall(json.dumps(facts).encode())
    return 0


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A bundle to be in, and directories for sockets that no other process uses; the fork server ends with the test."""
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "config.json").write_text("{}")
    monkeypatch.chdir(bundle)
    with tempfile.TemporaryDirectory() as short:  # a socket's address has 108 bytes
        monkeypatch.setattr(address, "SOCKETS", Path(short) / "s")
        monkeypatch.setattr(place, "DIRECTORY", f"{short}/f")
        installed(Path(short, "lib"), monkeypatch)
        monkeypatch.setattr(server, "QUIET_SECONDS", 5.0)
        monkeypatch.setattr(server, "_idle_seconds", lambda: 100.0)
        monkeypatch.setattr(serve, "serve", tell_all)
        yield Path(short)
        end_server()


def installed(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have an address as of a package in `root`: below the checkout's, other tests may make files at any time."""
    package = package_in(root)
    monkeypatch.setattr(place, "__file__", str(package / "fork_server" / "place.py"))
    return package


def leave() -> None:
    """Leave a server with the standard streams of a program, not those of pytest, which are other descriptors."""
    names = ("stdin", "stdout", "stderr")
    streams = [io.TextIOWrapper(io.FileIO(fd, "w" if fd else "r", closefd=False)) for fd in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        for name, stream in zip(names, streams, strict=True):
            patch.setattr(sys, name, stream)
        server.leave()


def server_pid() -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.connect(place.socket_path())
        pid, _, _ = struct.unpack("=iII", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


def end_server() -> None:
    """Kill the server, and its successor, which is in no other group than its own yet."""
    try:
        pid = server_pid()
    except OSError:
        return
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with suppress(OSError):  # a daemon may end at any time
            if Path(f"/proc/{child}/comm").read_text() == "kybernate-fork\n":
                os.kill(int(child), signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)


def eventually(look: Callable[[], bool], seconds: float = DEADLINE) -> None:
    end = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < end, f"not so after {seconds} s"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("client")


@pytest.fixture
def client(compiled: Path, node: Path) -> Client:
    return Client(compiled, node / "lib", node / "f")


def start(client: Client, **how: Any) -> dict[str, object]:
    """Start a daemon through the fork server, and return what it reports."""
    done = client.ask(START, **how)
    assert done.returncode == 0, done.stderr
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(json.loads(done.stdout)["address"].removeprefix("unix://"))
        facts: dict[str, object] = json.loads(caller.makefile().read())
        return facts


def test_daemon_is_what_its_client_is(node: Path, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    usr2 = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    leave()
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    before, hangup = os.umask(0o027), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        facts = start(client, env=dict(os.environ))  # a library may have changed the one below it
    finally:
        signal.signal(signal.SIGUSR2, usr2)
        signal.signal(signal.SIGHUP, hangup)
        os.umask(before)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert facts["sid"] == facts["pid"]
    assert facts["umask"] == 0o027
    assert (facts["hangup"], facts["usr2"]) == (str(signal.SIG_IGN), str(signal.SIG_DFL))
    assert facts["pipe"] == str(signal.SIG_IGN)
    assert facts["nofile"] == soft - 1
    assert facts["nice"] == os.nice(0)
    assert facts["environ"] == dict(os.environ)
    assert facts["cwd"] == str(node) or facts["cwd"] == str(Path.cwd())
    assert facts["cmdline"] == ["containerd-shim-kybernate-v1", *START]
    assert facts["parent"] == server_pid()
    assert sorted(kind for kind in facts["fds"] if "/fd" not in kind) == ["/dev/null"] * 3 + ["socket"]  # type: ignore[attr-defined]


def test_second_container_of_the_pod_gets_the_address_of_the_first(node: Path, client: Client) -> None:
    leave()
    first, second = client.ask(START), client.ask(START)
    assert (first.returncode, second.returncode) == (0, 0)
    assert first.stdout == second.stdout
    assert json.loads(first.stdout)["address"] == Path("address").read_text()


def test_daemon_that_is_there_is_found_for_any_client(node: Path, client: Client) -> None:
    """Nothing has to be given to a process that only says where the daemon is."""
    leave()
    first = client.ask(START)
    second = client.ask(START, preexec_fn=lambda: prctl(PR_SET_NO_NEW_PRIVS, 1))
    assert (second.returncode, second.stdout) == (0, first.stdout)


def test_server_works_where_containers_have_taken_all_instances_of_inotify(
    node: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a user are shared by all of its programs, and root's are also those of root in containers."""

    def none_left(path: str, mask: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(server, "inotify_watch", none_left)
    leave()
    before = server_pid()
    assert client.ask(START).returncode == 0
    assert server_pid() == before


def test_failure_to_come_up_is_told_and_leaves_no_socket(
    node: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise RuntimeError("no memory for that")

    monkeypatch.setattr(serve, "serve", fail)
    leave()
    done = client.ask(START)
    assert done.returncode == 1
    assert "cannot start the shim of c1: RuntimeError: no memory for that" in done.stderr
    assert list(address.SOCKETS.iterdir()) == []


@pytest.mark.parametrize(("argv", "words"), [(["-id", "c1", "start"], "no -namespace given"), (["delete"], "no -name")])
def test_wrong_command_line_is_answered_as_without_it(node: Path, client: Client, argv: list[str], words: str) -> None:
    leave()
    done = client.ask(argv)
    assert done.returncode == 2
    assert words in done.stderr


def test_delete_is_answered(node: Path, client: Client) -> None:
    leave()
    argv = [client.path, "-namespace", "ns", "-id", "c1", "-bundle", str(node / "none"), "delete"]
    assert subprocess.run(argv, capture_output=True, check=True).stdout.startswith(b"\x08")


def test_info_is_answered(node: Path, client: Client, tmp_path: Path) -> None:
    runtime = tmp_path / "runc"
    runtime.write_text("#!/bin/sh\necho -n '{}'\n")
    runtime.chmod(0o755)
    leave()
    options = pack(Options(binary_name=str(runtime)))
    argv, given = [client.path, "-info"], options.SerializeToString()
    said = RuntimeInfo.FromString(subprocess.run(argv, input=given, capture_output=True, check=True).stdout)
    assert said.options == options
    assert said.features.value == b"{}"


def test_client_that_dies_before_it_takes_the_daemon_leaves_none(node: Path) -> None:
    leave()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(place.socket_path())
        pid = int(connection.recv(100))
        socket.send_fds(connection, ["\0".join(START).encode()], [0, 1, 2])
        assert json.loads(connection.recv(1000).removeprefix(b"\0"))["address"].startswith("unix://")
        assert len(list(address.SOCKETS.iterdir())) == 1
    eventually(lambda: not Path(f"/proc/{pid}").exists())
    assert list(address.SOCKETS.iterdir()) == []


def test_client_with_what_cannot_be_given_to_a_process_is_refused(node: Path, client: Client) -> None:
    leave()
    done = client.ask(START, preexec_fn=lambda: prctl(PR_SET_NO_NEW_PRIVS, 1))
    assert done.returncode == ITSELF
    assert "NoNewPrivs" in done.stdout


def test_there_is_one_server_whoever_leaves_it(node: Path) -> None:
    threads = [threading.Thread(target=leave) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = server_pid()
    leave()
    assert server_pid() == first


def test_killed_server_is_none_and_is_replaced(node: Path, client: Client) -> None:
    leave()
    end_server()
    eventually(lambda: "no fork server" in client.ask(["delete"]).stdout)
    leave()
    assert start(client)["cmdline"]


def test_idle_server_ends_and_takes_its_socket_along(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_idle_seconds", lambda: 0.2)
    leave()
    eventually(lambda: list((node / "f").iterdir()) == [])


def test_server_whose_socket_is_removed_ends(node: Path) -> None:
    leave()
    pid = server_pid()
    Path(place.socket_path()).unlink()
    eventually(lambda: not Path(f"/proc/{pid}/exe").exists())


def test_server_is_not_wanted_where_the_configuration_says_so(
    node: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_idle_seconds", lambda: 0.0)
    leave()
    assert "no fork server" in client.ask(START).stdout


def test_successor_takes_over_and_names_itself(node: Path, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "QUIET_SECONDS", 0.0)
    leave()
    first = server_pid()
    eventually(lambda: not Path(f"/proc/{first}/exe").exists())  # to ask it again and again would fill its queue
    assert server_pid() != first
    assert start(client)["parent"] == server_pid()


def test_socket_of_a_killed_server_of_another_version_goes(node: Path) -> None:
    (node / "f").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(f"{node}/f/dead")
        dead.listen()
    leave()
    assert [str(path) for path in (node / "f").iterdir()] == [place.socket_path()]


@pytest.mark.parametrize("what", ["package", "interpreter"])
def test_other_installation_has_another_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    package = installed(tmp_path / "lib", monkeypatch)
    before = place.socket_path()
    assert place.socket_path() == before
    if what == "package":
        installed(tmp_path / "other", monkeypatch)
    else:
        monkeypatch.setattr("sys.executable", str(package / "__init__.py"))
    assert place.socket_path() != before


def test_replaced_package_has_another_address_even_with_the_same_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = installed(tmp_path, monkeypatch)
    os.utime(package / "__init__.py", (1, 1))
    before = place.socket_path()
    (package / "new").touch()
    os.utime(package / "new", (1, 1))
    (package / "new").rename(package / "__init__.py")
    assert place.socket_path() != before
