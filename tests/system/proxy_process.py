"""`kybernate proxy` as a process of the lab, before containers that an agent wakes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kybernate.messages import agent_pb2 as wire
from tests.system.ctr import eventually
from tests.system.node_agent import NodeAgent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def proxying(place: Path, agent: NodeAgent, settings: str) -> Iterator[str]:
    """Start one with these settings besides its own address and the agent's; yield its URL."""
    own = free_port()
    config = place / "proxy.yaml"
    head = f"listen: 127.0.0.1:{own}\nagent: {{address: '{agent.address}'}}\nhaproxy: {{state: {place}/haproxy}}\n"
    config.write_text(head + settings)
    log = place / "proxy.log"
    command = [sys.executable, "-c", "from kybernate.cli import main; main()", "proxy", "--config", str(config)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd="/", env={**os.environ, "PYTHONPATH": ""})
    try:
        eventually(lambda: "proxy.started" in log.read_text(), seconds=40)
        yield f"http://127.0.0.1:{own}"
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 0
    finally:
        process.kill()
        process.wait()
        print(log.read_text()[-4000:])


def wakes(agent: NodeAgent) -> int:
    found = agent.call("Operations", "ListOperations", wire.ListOperationsRequest()).operations
    return sum(one.verb == "wake" for one in found)
