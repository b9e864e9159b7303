"""An agent with seats on this node's pretended GPUs, at the socket where shims and commands find it."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from kybernate.messages import agent_pb2 as wire
from kybernate.node.words import word
from tests.fakes.cuda import Gpus
from tests.system.ctr import eventually
from tests.system.node_agent import NodeAgent

SOCKET = Path("/run/kybernate/agent.sock")
SEATED = ["--annotation", "kybernate.io/seat=one"]
RULES = "minimumResidency: 0.2, slice: 1, yieldAfter: 0.1, idleAfter: 0, reserve: 8Mi, ramLow: 0, ramHigh: 0"
CONFIGURATION = """
profiles: [{{name: one, resource: kyb.ai/one, groupSize: 1, seatsPerGroup: {seats}}}]
gpuTopology: {{groups: [{{name: G0, gpus: [0]}}]}}
rules: {{{rules}}}
"""


@dataclass
class SeatsAgent(NodeAgent):
    """The agent of this node, by its usual socket."""

    @property
    def address(self) -> str:
        return f"unix:{SOCKET}"

    def write(self, settings: str = "") -> None:
        super().write(settings)
        file = self.place / "agent.toml"
        file.write_text(file.read_text().replace(f"{self.place}/run/agent.sock", str(SOCKET)))

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(20)

    def seats(self) -> dict[str, wire.Seat]:
        """Return the seats that containers have, by the containers' ids."""
        answer = self.call("Seats", "ListSeats", wire.ListSeatsRequest())
        return {one.container: one for one in answer.seats}

    def status(self, id: str) -> str:
        """Return the status of a container's seat, "" where it has none or no agent answers."""
        try:
            found = self.seats().get(id)
        except grpc.RpcError:
            return ""
        return word(wire.Seat.Status, found.status) if found is not None else ""

    def operations(self) -> list[wire.Operation]:
        """Return all operations, the newest first."""
        found: list[wire.Operation] = []
        while page := self.call(
            "Operations", "ListOperations", wire.ListOperationsRequest(limit=500, before=found[-1].id if found else "")
        ).operations:
            found += page
        return found

    def becomes(self, id: str, status: str, *, seconds: float = 40) -> None:
        def look() -> bool:
            assert (found := self.status(id)) == status, f"{id} is {found!r}, not {status}"
            return True

        eventually(look, seconds=seconds)


def runs(operation: wire.Operation, at: float) -> bool:
    """Return whether an operation ran at a time."""
    begin, end = operation.started.ToNanoseconds() / 1e9, operation.ended.ToNanoseconds() / 1e9
    return bool(begin) and begin <= at <= (end or at)


@dataclass
class Watched:
    """What the pretended driver's accounts of the first GPU say: the times at which more than one held memory."""

    gpus: Gpus
    together: list[tuple[float, list[str]]] = field(default_factory=list)
    looks: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.ended.is_set():
            held = [name for name, sizes in self.gpus.held().items() if sizes[0]]
            self.looks += 1
            if len(held) > 1:
                self.together.append((time.time(), held))
            self.ended.wait(0.005)


@contextmanager
def watching(gpus: Gpus) -> Iterator[Watched]:
    """Look at the driver's accounts all the time, in a thread, while the block runs."""
    watched = Watched(gpus)
    thread = threading.Thread(target=watched.run, daemon=True)
    thread.start()
    try:
        yield watched
    finally:
        watched.ended.set()
        thread.join()


@contextmanager
def seats_agent(place: Path, *, seats: int = 4, rules: str = RULES, more: str = "") -> Iterator[SeatsAgent]:
    (place / "seats.yaml").write_text(CONFIGURATION.format(seats=seats, rules=rules) + more)
    agent = SeatsAgent(place, f'[seats]\nfile = "{place}/seats.yaml"\ndevice_plugins = "{place}/plugins"\n'
                       f'pod_resources = "{place}/pods.sock"\n')  # fmt: skip
    agent.start()
    try:
        agent.wait_ready()
        yield agent
    finally:
        if agent.process is not None and agent.process.poll() is None:
            agent.stop()
        Path("/run/kybernate/seats-wait").unlink(missing_ok=True)
        shutil.rmtree(SOCKET.with_name("agent.private"), ignore_errors=True)
        print(agent.log.read_text()[-8000:])
