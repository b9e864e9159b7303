"""`start`: it answers once the daemon serves, passes on why one does not, and leaves nothing behind in that case."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kybernate_shim import address, serve
from kybernate_shim.invocation import Invocation
from kybernate_shim.start import start

Serve = Callable[[Invocation, socket.socket, Path, Callable[[], None]], int]
CALL = Invocation(action="start", namespace="ns", id="c1", address="/run/containerd/containerd.sock")


@pytest.fixture
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of sockets; the working directory is a bundle, and stdin empty, as under containerd."""
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "config.json").write_text(json.dumps({"annotations": {}}))
    monkeypatch.chdir(bundle)
    with Path(os.devnull).open() as null, tempfile.TemporaryDirectory() as short:  # a socket's address has 108 bytes
        monkeypatch.setattr("sys.stdin", null)
        monkeypatch.setattr(address, "SOCKETS", Path(short) / "s")
        yield Path(short) / "s"


def daemon(monkeypatch: pytest.MonkeyPatch, body: Callable[[socket.socket, Callable[[], None]], int]) -> None:
    """Put `body` in the place of the real daemon."""
    monkeypatch.setattr(serve, "serve", lambda invocation, listener, path, *, ready: body(listener, ready))


def greet_once(listener: socket.socket, ready: Callable[[], None]) -> int:
    ready()
    with listener.accept()[0] as caller:
        links = [Path(f"/proc/self/fd/{fd}") for fd in range(64)]
        told = {link.name: str(link.readlink()) for link in links if link.is_symlink()}
        caller.sendall(json.dumps({"sid": os.getsid(0), "pid": os.getpid(), "fds": told}).encode())
    return 0


def test_daemon_serves_at_the_address_that_is_printed(
    sockets: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    daemon(monkeypatch, greet_once)
    assert start(CALL) == 0
    path = address.socket_path(CALL.address, "ns", "c1")
    assert json.loads(capfd.readouterr().out) == {"version": 2, "address": f"unix://{path}", "protocol": "ttrpc"}
    assert Path("address").read_text() == f"unix://{path}"
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        said = client.makefile().read()
        assert said, capfd.readouterr()
        told = json.loads(said)
    os.waitpid(told["pid"], 0)
    assert told["sid"] == told["pid"]
    assert {told["fds"][name] for name in "012"} == {"/dev/null"}
    kinds = [target.partition(":")[0] for name, target in told["fds"].items() if name not in "012"]
    assert sorted(kinds)[-2:] == ["socket", "socket"]  # the listener and its caller; of the rest, nothing was inherited
    assert "pipe" not in kinds


def test_second_container_of_the_pod_gets_the_same_address_and_no_daemon(
    sockets: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon(monkeypatch, lambda listener, ready: pytest.fail("a second daemon"))
    listener = None
    with address.exclusive(sockets):
        listener = address.listen(address.socket_path(CALL.address, "ns", "c1"))
    assert listener is not None
    with listener:
        assert start(CALL) == 0
    assert json.loads(capsys.readouterr().out)["address"] == Path("address").read_text()


def raise_error(listener: socket.socket, ready: Callable[[], None]) -> int:
    raise RuntimeError("no memory for that")


def die(listener: socket.socket, ready: Callable[[], None]) -> int:
    os._exit(3)


@pytest.mark.parametrize(
    ("body", "words"), [(raise_error, "RuntimeError: no memory for that"), (die, "ended without a message")]
)
def test_daemon_that_does_not_come_up_is_reported_and_leaves_no_socket(
    sockets: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    body: Callable[[socket.socket, Callable[[], None]], int],
    words: str,
) -> None:
    daemon(monkeypatch, body)
    assert start(CALL) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("containerd-shim-kybernate-v1: cannot start the shim of c1: ")
    assert words in said.err
    assert list(sockets.iterdir()) == []
    os.waitpid(-1, 0)


def test_bundle_that_takes_no_address_starts_no_daemon(
    sockets: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a full disk: containerd would not learn of the daemon, and no process would end it."""
    daemon(monkeypatch, lambda listener, ready: pytest.fail("a daemon"))
    Path("address").mkdir()
    assert start(CALL) == 1
    assert "cannot start the shim of c1" in capsys.readouterr().err
    assert not sockets.exists()


@pytest.mark.parametrize("config", ["", "{", '{"annotations": '])
def test_config_that_is_cut_off_is_reported(sockets: Path, capsys: pytest.CaptureFixture[str], config: str) -> None:
    Path("config.json").write_text(config)
    assert start(CALL) == 1
    assert "cannot start the shim of c1" in capsys.readouterr().err
