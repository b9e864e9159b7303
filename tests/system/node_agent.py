"""The node agent as a process of the lab, with settings of its own, and clients of it: root, users, containers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from kybernate.messages import agent_pb2 as wire
from kybernate.messages import agent_pb2_grpc as services
from kybernate_shim.linux.cgroup.hierarchies import directories
from tests.system.ctr import eventually
from tests.system.gpu.node import forget_helper

ROOT = Path(__file__).parents[2]
FINAL = (wire.SUCCEEDED, wire.FAILED, wire.CANCELLED)
# Makes calls as one process: prints the answer or the code of each, as JSON. Waits for a line on stdin before each.
CLIENT = """
import json, sys, grpc
from google.protobuf.json_format import MessageToDict
from kybernate.messages import agent_pb2, agent_pb2_grpc
address, *calls = sys.argv[1:]
channel = grpc.insecure_channel(address)
for call in calls:
    service, method, message, fields = call.split(" ", 3)
    stub = getattr(agent_pb2_grpc, service + "Stub")(channel)
    if sys.stdin.readline() == "":
        break
    try:
        answer = getattr(stub, method)(getattr(agent_pb2, message)(**json.loads(fields)), timeout=20)
        print(json.dumps(MessageToDict(answer, preserving_proto_field_name=True)), flush=True)
    except grpc.RpcError as error:
        print(json.dumps({"code": error.code().name, "details": error.details()}), flush=True)
"""


@dataclass
class NodeAgent:
    """The process. `place` holds settings, journal, registry, sockets and log."""

    place: Path
    settings: str = ""
    process: subprocess.Popen[bytes] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    name: str = "lab-node"

    @property
    def address(self) -> str:
        return f"unix:{self.place}/run/agent.sock"

    @property
    def own_address(self) -> str:
        """The restricted socket."""
        return f"unix:{self.place}/own/agent.sock"

    @property
    def log(self) -> Path:
        return self.place / "log"

    def lines(self, event: str) -> list[dict[str, Any]]:
        """Return the lines of the agent's log with an event."""
        found = (json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{"))
        return [line for line in found if line["event"] == event]

    def write(self, settings: str = "") -> None:
        top, _, tables = settings.partition("[")
        (self.place / "agent.toml").write_text(
            f'state_directory = "{self.place}/state"\nsocket = "{self.place}/run/agent.sock"\n'
            f'registry = "sqlite:///{self.place}/registry.db"\nnode_name = "{self.name}"\n{top}'
            + (f"[{tables}" if tables else "")
        )

    def start(self, argv: Sequence[str] = (), **options: Any) -> None:
        self.write(self.settings)
        command = [*argv, sys.executable, "-c", "from kybernate.cli import main; main()", "agent", "--config",
                   str(self.place / "agent.toml")]  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env={**os.environ, "PYTHONPATH": "", **self.environment},
                **options,
            )

    def wait_ready(self, *, seconds: float = 40) -> None:
        """Wait until the agent knows the node and serves."""

        def serves() -> bool:
            assert self.process is None or self.process.poll() is None, self.log.read_text()[-3000:]
            return bool(self.checked() == 1)

        eventually(serves, seconds=seconds, pause=0.1)

    def checked(self, service: str = "") -> int:
        """Return the answer of the health service, 0 without one."""
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        with grpc.insecure_channel(self.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status)
            except grpc.RpcError:
                return 0

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End the agent and return its exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(40)

    def call(self, service: str, method: str, request: Any, *, seconds: float = 30) -> Any:
        with grpc.insecure_channel(self.address) as channel:
            return getattr(getattr(services, f"{service}Stub")(channel), method)(
                request, timeout=seconds, wait_for_ready=True
            )

    def registered(self, image: str) -> Any:
        """Return an image that the registry has by now, None where it has none of that name."""
        try:
            return self.call("Checkpoints", "GetImage", wire.GetImageRequest(image=image))
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            return None

    def operation(self, method: str, request: Any) -> wire.Operation:
        answer: wire.Operation = self.call("Operations", method, request)
        return answer

    def get(self, id: str) -> wire.Operation:
        return self.operation("GetOperation", wire.GetOperationRequest(id=id))

    def until(self, id: str, holds: Callable[[wire.Operation], bool], *, seconds: float = 60) -> wire.Operation:
        """Wait until something holds of an operation, and return it."""

        def look() -> wire.Operation | None:
            now = self.get(id)
            assert holds(now), now
            return now

        found = eventually(look, seconds=seconds)
        assert found is not None
        return found

    def ended(self, id: str, *, seconds: float = 60) -> wire.Operation:
        return self.until(id, lambda one: one.state in FINAL, seconds=seconds)

    def done(self, id: str) -> wire.Operation:
        found = self.ended(id)
        assert found.state == wire.SUCCEEDED, found
        return found


@contextmanager
def running(place: Path, settings: str = "", **options: Any) -> Iterator[NodeAgent]:
    """Run an agent; it has ended, by SIGKILL if it must, when the block ends."""
    agent = NodeAgent(place, settings)
    agent.start(**options)
    try:
        agent.wait_ready()
        yield agent
    finally:
        if agent.process is not None and agent.process.poll() is None:
            agent.process.kill()
            agent.process.wait(20)
        print(agent.log.read_text()[-6000:])


@dataclass
class Client:
    """A process that makes calls, one for each line that it is sent."""

    process: subprocess.Popen[str]

    def next(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found


def call(service: str, method: str, message: str = "", **fields: Any) -> str:
    return f"{service} {method} {message or method + 'Request'} {json.dumps(fields)}"


@contextmanager
def client(
    address: str, *calls: str, cgroups_of: int = 0, argv: Sequence[str] = (), **options: Any
) -> Iterator[Client]:
    """Run a client, as a process in the cgroups of process `cgroups_of` if one is given."""
    process = subprocess.Popen(
        [*argv, sys.executable, "-c", CLIENT, address, *calls],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=(lambda: move(os.getpid(), cgroups_of)) if cgroups_of else None,
        cwd="/src",
        **options,
    )
    try:
        yield Client(process)
    finally:
        process.kill()
        process.communicate(timeout=10)


def move(pid: int, to: int) -> None:
    """Put a process into the cgroups of another one, as those that a runtime starts in a container are."""
    for directory in set(directories(to).values()):
        (directory / "cgroup.procs").write_text(str(pid))


@contextmanager
def short_place() -> Iterator[Path]:
    """A directory whose path is short enough for sockets, and which other users can pass through."""
    place = Path(f"/tmp/agent-{os.getpid()}")
    place.mkdir(mode=0o755)
    try:
        yield place
    finally:
        shutil.rmtree(place)
        forget_helper()  # which the agent has asked for the node's GPUs


@contextmanager
def manager(place: Path) -> Iterator[tuple[socket.socket, Mapping[str, str]]]:
    """A service manager's socket, and the environment that names it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(place / "notify"))
        listening.settimeout(30)
        yield listening, {"NOTIFY_SOCKET": str(place / "notify"), "WATCHDOG_USEC": "600000"}
