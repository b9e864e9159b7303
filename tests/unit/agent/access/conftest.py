"""A gRPC server behind the agent's own sockets, as the agent assembles it."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kybernate.agent.access.front import Callers, EntryPoint, Front
from kybernate.node.failure import Failure


class Log:
    """Keeps what is logged: level, event, fields."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, Any]]] = []

    def __getattr__(self, level: str) -> Callable[..., None]:
        return lambda event, **fields: self.lines.append((level, event, fields))

    def reasons(self) -> list[str]:
        return [fields["reason"] for _, event, fields in self.lines if event == "connection.refused"]


class WhoAmI(health_pb2_grpc.HealthServicer):
    """Answers with the caller in the place of an error."""

    def __init__(self, callers: Callers) -> None:
        self.callers = callers
        self.peers: list[str] = []

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.peers.append(context.peer())
        one = self.callers.behind(context.peer())
        try:
            caller = one.caller() if one else None
        except Failure as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        await context.abort(grpc.StatusCode.OK if caller is None else grpc.StatusCode.ABORTED, str(caller))


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="kyb-") as name:
        yield Path(name)


class Served:
    """A front with its server. `ask` says who the server thinks the client is."""

    def __init__(self, front: Front, servicer: WhoAmI, log: Log, address: str) -> None:
        self.front, self.servicer, self.log, self.address = front, servicer, log, address

    async def ask(self, credentials: grpc.ChannelCredentials | None = None, *, seconds: float = 10) -> str:
        async with channel(self.address, credentials) as one:
            return await who(one, seconds=seconds)


def channel(address: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    options = (("grpc.use_local_subchannel_pool", 1),)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


async def who(one: grpc.aio.Channel, *, seconds: float = 10) -> str:
    try:
        await health_pb2_grpc.HealthStub(one).Check(health_pb2.HealthCheckRequest(), timeout=seconds)
    except grpc.aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.ABORTED:
            return str(error.details())
        raise
    raise AssertionError("the server has not answered with the caller")


@asynccontextmanager
async def serving(place: Path, listener: socket.socket, entry_point: EntryPoint, address: str) -> AsyncIterator[Served]:
    """Serve behind `entry_point` until the block ends."""
    callers, log = Callers(), Log()
    server, servicer = grpc.aio.server(), WhoAmI(callers)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    (place / "inside").mkdir(mode=0o700)
    inner = place / "inside" / "grpc.sock"
    server.add_insecure_port(f"unix:{inner}")
    await server.start()
    front = Front(listener, inner, callers, entry_point, log)
    front.start()
    try:
        yield Served(front, servicer, log, address)
    finally:
        await front.stop()
        await server.stop(0)
        listener.close()
        assert not callers._known
        assert [path.name for path in (place / "inside").iterdir()] in ([], ["grpc.sock"])


def unix_listener(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(16)
    return listener


async def soon(look: Callable[[], Any], *, seconds: float = 10) -> Any:
    """Wait on the event loop until `look` is true."""
    async with asyncio.timeout(seconds):
        while not (found := look()):  # noqa: ASYNC110  # what is looked at wakes nothing
            await asyncio.sleep(0.01)
    return found
