"""systemd's side of the agent: messages to the manager, the watchdog's patience, sockets that were opened before."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kybernate.agent.notify import FIRST, Notifier, forget, passed_sockets

# Begins with a socket as its descriptor 3, and says what it finds.
ACTIVATED = f"""
import json, os
from kybernate.agent.notify import passed_sockets
os.environ["LISTEN_PID"] = os.environ.get("LISTEN_PID") or str(os.getpid())
found = passed_sockets(os.environ, os.getpid())
print(json.dumps({{name: [one.getsockname(), os.get_inheritable(one.fileno())] for name, one in found.items()}}))
assert all(one.fileno() >= {FIRST} for one in found.values())
"""


@pytest.mark.parametrize("abstract", [False, True])
def test_manager_hears(tmp_path: Path, abstract: bool) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        name = f"kybernate-{os.getpid()}" if abstract else str(tmp_path / "notify")
        manager.bind(f"\0{name}" if abstract else name)
        manager.settimeout(5)
        notifier = Notifier.of({"NOTIFY_SOCKET": f"@{name}" if abstract else name}, 1)
        notifier.send(READY="1", STATUS="serving")
        assert manager.recv(100) == b"READY=1\nSTATUS=serving"


@pytest.mark.parametrize("address", ["", "nonsense", "/nowhere/notify", "@nowhere-at-all"])
def test_without_a_manager_nothing_happens(address: str) -> None:
    Notifier.of({"NOTIFY_SOCKET": address}, 1).send(READY="1")


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, 0.0),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "8"}, 0.0),
        ({"WATCHDOG_USEC": "-1"}, 0.0),
        ({"WATCHDOG_USEC": "many"}, 0.0),
    ],
)
def test_patience_of_the_watchdog(environment: dict[str, str], seconds: float) -> None:
    assert Notifier.of(environment, 7).watchdog == seconds


def activated(environment: dict[str, str], sockets: list[socket.socket]) -> dict[str, list[object]]:
    """Start a process whose descriptors from 3 on are the sockets, as systemd does."""
    moves = "".join(f"os.dup2({one.fileno()}, {FIRST + index});" for index, one in enumerate(sockets))
    program = f"import os; {moves} os.execv({sys.executable!r}, [{sys.executable!r}, '-c', {ACTIVATED!r}])"
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.getcwd(), **environment},  # noqa: PTH109
        pass_fds=[one.fileno() for one in sockets],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, list[object]] = json.loads(answer.stdout)
    return found


def test_sockets_are_found_by_their_names_and_are_not_inherited(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        high = [socket.socket(fileno=os.dup(one.fileno())) for one in (first, second)]
        for one, name in zip(high, "ab", strict=True):
            one.bind(str(tmp_path / name))
            one.listen()
        parked = [socket.socket(fileno=fd) for fd in _above(high)]
        found = activated({"LISTEN_FDS": "2", "LISTEN_FDNAMES": "agent:self"}, parked)
        assert found == {"agent": [str(tmp_path / "a"), False], "self": [str(tmp_path / "b"), False]}
        assert activated({"LISTEN_FDS": "1"}, parked)["0"] == [str(tmp_path / "a"), False]
        for one in [*high, *parked]:
            one.close()


def _above(sockets: list[socket.socket]) -> list[int]:
    """Return copies whose numbers no move to 3 and 4 overwrites."""
    import fcntl

    return [fcntl.fcntl(one.fileno(), fcntl.F_DUPFD, 50) for one in sockets]


@pytest.mark.parametrize(
    "environment", [{}, {"LISTEN_FDS": "1", "LISTEN_PID": "1"}, {"LISTEN_FDS": "one", "LISTEN_PID": "7"}]
)
def test_sockets_of_another_process_are_not_taken(environment: dict[str, str]) -> None:
    assert passed_sockets(environment, 7) == {}


def test_programs_that_the_agent_starts_are_not_the_service() -> None:
    environment = {
        "LISTEN_FDS": "1",
        "LISTEN_PID": "7",
        "NOTIFY_SOCKET": "/run/x",
        "WATCHDOG_USEC": "1",
        "PATH": "/bin",
    }
    forget(environment)
    assert environment == {"PATH": "/bin"}
