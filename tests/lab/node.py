"""The programs that run in a node, for its first process and for tests that kill and restart them.

    containerd = Containerd()
    containerd.kill()          # SIGKILL; shims and containers live on
    containerd.restart()       # returns when it serves clients and CRI again

`python3 -m tests.lab.node restart` does the same from a shell.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.lab.containerd_config import SOCKET, STREAM_PORT

STATE = Path("/run/lab")
LOGS = Path("/var/log/lab")
REGISTRY_PORT = 5000
# As a service of systemd would have it: nothing of the caller's environment reaches containerd and its shims.
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


class NotReady(Exception):
    """A program ended, or did not serve in time; shows the last lines of its log."""


@dataclass(frozen=True)
class Daemon:
    """A program in the background. Its pid is in /run/lab/NAME.pid, its output in /var/log/lab/NAME.log.

    `enter`: the command that starts it in other namespaces, which its own command follows; it keeps its pid.
    """

    name: str
    argv: tuple[str, ...]
    ports: tuple[int, ...] = ()
    enter: tuple[str, ...] = ()

    @property
    def log(self) -> Path:
        return LOGS / f"{self.name}.log"

    @property
    def pid_file(self) -> Path:
        return STATE / f"{self.name}.pid"

    @property
    def pid(self) -> int:
        """The pid of the last start, which may have ended since."""
        return int(self.pid_file.read_text())

    def tail(self, lines: int = 20) -> str:
        """Return the end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""

    def start(self) -> None:
        """Start the program as a child of the node's first process, and return immediately."""
        STATE.mkdir(exist_ok=True)
        script = '"$@" >>"$0" 2>&1 </dev/null & echo $!'
        pid = subprocess.check_output(
            [*self.enter, "sh", "-c", script, self.log, *self.argv], env=ENVIRONMENT, start_new_session=True, cwd="/"
        )
        self.pid_file.write_bytes(pid)

    def alive(self) -> bool:
        """Tell whether the program runs; one that has ended and waits to be reaped does not."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    def kill(self, number: int = signal.SIGKILL, *, seconds: float = 10) -> None:
        """Send a signal and wait until the program has ended. Raises NotReady if it has not after `seconds`."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            with suppress(ProcessLookupError):  # it had ended, and was reaped just now
                signal.pidfd_send_signal(descriptor, number)
            if not select.select([descriptor], [], [], seconds)[0]:
                raise NotReady(f"{self.name} still runs {seconds:g} s after signal {number}\n{self.tail()}")
        finally:
            os.close(descriptor)

    def restart(self, number: int = signal.SIGKILL) -> None:
        """End the program by a signal, start it again, wait until it serves."""
        self.kill(number)
        self.start()
        self.wait_ready()

    def wait_ready(self, *, seconds: float = 30) -> None:
        """Wait until the program serves. Raises NotReady when it ends, or after `seconds`."""
        end = time.monotonic() + seconds
        while not self.serves():
            if not self.alive():
                raise NotReady(f"{self.name} has ended\n{self.tail()}")
            if time.monotonic() > end:
                raise NotReady(f"{self.name} does not serve after {seconds:g} s\n{self.tail()}")
            time.sleep(0.02)

    def serves(self) -> bool:
        """Tell whether every port of the program accepts connections."""
        return all(_accepts(port) for port in self.ports)


class Containerd(Daemon):
    """containerd, ready when it answers and its CRI plugin, which opens its port for streams last, is up."""

    def __init__(self) -> None:
        super().__init__("containerd", ("/usr/bin/containerd",), (STREAM_PORT,))

    def serves(self) -> bool:
        return super().serves() and _succeeds(["ctr", "version"])

    @property
    def socket(self) -> Path:
        return SOCKET


class Registry(Daemon):
    """The image registry on localhost:5000."""

    def __init__(self) -> None:
        super().__init__("registry", ("/usr/bin/docker-registry", "serve", "/etc/lab/registry.yml"), (REGISTRY_PORT,))


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _succeeds(argv: Sequence[str]) -> bool:
    return subprocess.run(argv, capture_output=True, timeout=20, check=False).returncode == 0


def main(argv: Sequence[str]) -> int:
    """Serve the command line: `[registry] start|kill|restart|tail`, containerd where nothing is named."""
    daemon: Daemon = Registry() if argv[:1] == ["registry"] else Containerd()
    verb = argv[-1] if argv else ""
    if verb == "start":
        daemon.start()
        daemon.wait_ready()
    elif verb == "kill":
        daemon.kill()
    elif verb == "restart":
        daemon.restart()
    elif verb == "tail":
        print(daemon.tail(100))
    else:
        print("usage: python3 -m tests.lab.node [registry] start|kill|restart|tail", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
