"""`kybernate proxy` as a process of the lab, before containers that an agent wakes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from kybernate.messages import agent_pb2 as wire
from tests.system.ctr import eventually
from tests.system.node_agent import NodeAgent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class ProxyProcess:
    """The process, which may be killed and started again. `place` holds settings, log and HAProxy's files."""

    place: Path
    settings: str
    listen: str = field(default_factory=lambda: f"127.0.0.1:{free_port()}")
    argv: Sequence[str] = ()  # what it is started by
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.listen}"

    @property
    def log(self) -> Path:
        return self.place / "proxy.log"

    def start(self) -> None:
        """Start it, and return once it serves."""
        config = self.place / "proxy.yaml"
        config.write_text(f"listen: {self.listen}\nhaproxy: {{state: {self.place}/haproxy}}\n{self.settings}")
        before = self.said("proxy.started")
        command = [*self.argv, sys.executable, "-c", "from kybernate.cli import main; main()", "proxy", "--config"]
        with self.log.open("ab") as output:
            environment = {**os.environ, "PYTHONPATH": ""}
            self.process = subprocess.Popen(
                [*command, str(config)], stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/",
                env=environment,
            )  # fmt: skip

        def serves() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                raise RuntimeError(f"the proxy has ended: {self.log.read_text()[-3000:]}")
            return self.said("proxy.started") > before

        eventually(serves, seconds=40)

    def said(self, event: str) -> int:
        """Return how many lines of its log have an event."""
        return self.log.read_text().count(f'"{event}"') if self.log.exists() else 0

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(40)
        self.process = None

    def stop(self) -> None:
        """End it as a service manager does. HAProxy ends with it, once its streams have."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(40) == 0

    def passes(self, model: str) -> bool:
        """Return whether HAProxy passes a model's requests by itself."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.place / "haproxy/admin.sock"))
            connection.sendall(f"show map {self.place}/haproxy/models.map\n".encode())
            rows = [line.split() for line in connection.makefile().read().splitlines()]
        return any(row[1:2] == [model] and row[2] != "activator" for row in rows)

    def vanish(self) -> None:
        """Kill it with its HAProxy, as a machine that is gone."""
        if self.process is not None:
            self.kill()
        while pid := self.haproxy():
            os.kill(pid, signal.SIGKILL)

    def haproxy(self) -> int:
        """Return the newest HAProxy with this proxy's configuration; 0 where there is none."""
        config = str(self.place / "haproxy/haproxy.cfg")
        found = [one for one in psutil.process_iter(["cmdline"]) if config in (one.info["cmdline"] or ())]
        return max(found, key=lambda one: one.create_time()).pid if found else 0


@contextmanager
def running(proxy: ProxyProcess) -> Iterator[ProxyProcess]:
    """Run a proxy, and end it by SIGTERM where the block neither fails nor has killed it."""
    try:
        proxy.start()
        yield proxy
        if proxy.process is not None:
            proxy.stop()
    finally:
        proxy.vanish()
        print(proxy.log.read_text()[-4000:] if proxy.log.exists() else "")


@contextmanager
def proxying(place: Path, agent: NodeAgent, settings: str) -> Iterator[str]:
    """Start one with these settings besides its own address and the agent's; yield its URL."""
    with running(ProxyProcess(place, f"agent: {{address: '{agent.address}'}}\n{settings}")) as proxy:
        yield proxy.url


def wakes(agent: NodeAgent) -> int:
    found = agent.call("Operations", "ListOperations", wire.ListOperationsRequest()).operations
    return sum(one.verb == "wake" for one in found)
