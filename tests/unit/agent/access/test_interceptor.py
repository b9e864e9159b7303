"""What stands before every call: the table, the caller, the limits of a container, and the audit log."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kybernate.agent.access.audit import REFUSALS_PER_MINUTE, AuditLog
from kybernate.agent.access.caller import CALLER, Caller, OwnContainer, Role
from kybernate.agent.access.interceptor import Access
from kybernate.agent.access.limits import Buckets, Weights
from kybernate.agent.access.roles import RULES
from kybernate.agent.service.errors import DETAILS, Translate
from kybernate.agent.settings import SelfSocket, Settings
from kybernate.messages import agent_pb2 as wire
from kybernate.messages import agent_pb2_grpc as services
from kybernate.node.failure import Denied
from kybernate_shim.config import Config
from tests.unit.agent.access.conftest import Log

ROOT = Caller(Role.OPERATOR, 0, os.getpid())
READER = Caller(Role.READER, 1000, 4711)
STRANGER = Caller(Role.NONE, 1001, 4712)
OWN = Caller(Role.CONTAINER, 0, 12, container=OwnContainer("k8s.io", "c1"))
TENANT = Caller(Role.CONTAINER, 0, 12, container=OwnContainer("k8s.io", "c2", "team", "pod", "app"))


class Operations(services.OperationsServicer):
    """Answers with what it knows of the caller."""

    async def Suspend(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.name == "broken":
            raise ZeroDivisionError("a defect of the agent")
        return wire.Operation(id="op1", requester=str(CALLER.get()), container="c1", namespace="k8s.io")

    async def GetOperation(self, request: Any, context: Any) -> Any:  # noqa: N802
        return wire.Operation(requester=str(CALLER.get()), id="x" * (3 << 20 if request.id == "large" else 0))

    async def WatchOperation(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        for number in range(3):
            yield wire.Operation(id=str(number), requester=str(CALLER.get()))

    Checkpoint = Restore = Resume = Swap = ListOperations = CancelOperation = Suspend


class Own(services.SelfServicer):
    async def GetSelf(self, request: Any, context: Any) -> Any:  # noqa: N802
        return wire.Container(id=CALLER.get().container.id)  # type: ignore[union-attr]

    async def Checkpoint(self, request: Any, context: Any) -> Any:  # noqa: N802
        return wire.Operation(id="op2", container="c2", namespace="k8s.io", image="/images/team/self")

    SuspendWhenIdle = GetOperation = CancelOperation = Checkpoint


@dataclass
class Known:
    """Stands for the callers that a front knows: every connection is this one's."""

    who: Caller | None
    failure: Denied | None = None

    def behind(self, peer: str) -> Known | None:
        return self if self.who else None

    def caller(self) -> Caller:
        if self.failure:
            raise self.failure
        assert self.who
        return self.who


@dataclass
class Agent:
    known: Known
    audit: Path
    log: Log
    time: list[float]
    settings: Settings
    channel: Any = None
    access: Any = None

    async def forgotten(self) -> None:
        """Wait until no call and no answer is counted any more."""
        weights = self.access.weights
        async with asyncio.timeout(10):
            while weights._calls or weights._bytes:  # noqa: ASYNC110  # gRPC forgets a call when it likes
                await asyncio.sleep(0)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit.read_text().splitlines()] if self.audit.exists() else []

    async def suspend(self, name: str = "c1") -> Any:
        return await services.OperationsStub(self.channel).Suspend(wire.SuspendRequest(name=name), timeout=10)

    async def refused(self, call: Any) -> grpc.StatusCode:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        return error.value.code()


@asynccontextmanager
async def running(place: Path, who: Caller | None, settings: Settings = Settings()) -> AsyncIterator[Agent]:  # noqa: B008
    agent = Agent(Known(who), place / "audit.jsonl", Log(), [0.0], settings)
    buckets = Buckets(lambda: agent.time[0])
    audit = AuditLog(lambda: Config(audit_log=agent.audit), agent.log, buckets)
    access = agent.access = Access(agent.known, audit, lambda: agent.settings, buckets)  # type: ignore[arg-type]
    server = grpc.aio.server(interceptors=[Translate(agent.log), access])
    services.add_OperationsServicer_to_server(Operations(), server)
    services.add_SelfServicer_to_server(Own(), server)
    server.add_generic_rpc_handlers([Unlisted()])
    server.add_insecure_port(f"unix:{place}/s")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"unix:{place}/s") as agent.channel:
            yield agent
    finally:
        await server.stop(0)


class Unlisted(grpc.GenericRpcHandler):
    """A method that was added to a service, and forgotten in the table of roles."""

    def service(self, details: Any) -> Any:
        if not details.method.endswith("/Forgotten"):
            return None

        async def answer(request: bytes, context: Any) -> bytes:
            return b"done"

        return grpc.unary_unary_rpc_method_handler(answer)


def test_caller_reaches_calls_and_streams(place: Path) -> None:
    async def main() -> None:
        async with running(place, ROOT) as agent:
            assert (await agent.suspend()).requester == f"uid 0 (pid {os.getpid()})"
            stream = services.OperationsStub(agent.channel).WatchOperation(wire.GetOperationRequest(), timeout=10)
            assert [(one.id, one.requester) async for one in stream] == [(n, str(ROOT)) for n in "012"]

    asyncio.run(main())


@pytest.mark.parametrize("who", [STRANGER, None], ids=["stranger", "unknown"])
def test_caller_without_a_role_may_neither_look_nor_change(place: Path, who: Caller | None) -> None:
    async def main() -> None:
        async with running(place, who) as agent:
            stub = services.OperationsStub(agent.channel)
            for call in (agent.suspend(), stub.GetOperation(wire.GetOperationRequest(), timeout=10)):
                assert await agent.refused(call) is grpc.StatusCode.PERMISSION_DENIED
            stream = stub.WatchOperation(wire.GetOperationRequest(), timeout=10)
            assert await agent.refused(stream.read()) is grpc.StatusCode.PERMISSION_DENIED

    asyncio.run(main())


def test_method_that_the_table_lacks_is_refused_to_root(place: Path) -> None:
    async def main() -> None:
        async with running(place, ROOT) as agent:
            call = agent.channel.unary_unary("/kybernate.node.v1.Operations/Forgotten")(b"", timeout=10)
            assert await agent.refused(call) is grpc.StatusCode.PERMISSION_DENIED
            call = agent.channel.unary_unary("/kybernate.node.v1.Operations/Nothing")(b"", timeout=10)
            assert await agent.refused(call) is grpc.StatusCode.UNIMPLEMENTED

    asyncio.run(main())


def test_readers_look_and_change_nothing(place: Path) -> None:
    async def main() -> None:
        async with running(place, READER) as agent:
            stub = services.OperationsStub(agent.channel)
            assert (await stub.GetOperation(wire.GetOperationRequest(), timeout=10)).requester == str(READER)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await agent.suspend()
            assert error.value.details() == "uid 1000 (pid 4711) may not call Suspend"
            details = wire.Error.FromString(dict(error.value.trailing_metadata())[DETAILS])
            assert (details.type, details.state) == ("Denied", "nothing was changed")
            assert "tls.operators" in details.advice
            (line,) = agent.lines()
            assert (line["verb"], line["decision"], line["task"]) == ("suspend", "refused", "c1")
            assert (line["caller"]["uid"], line["caller"]["pid"], line["caller"]["by"]) == (1000, 4711, "agent")

    asyncio.run(main())


def test_operators_change_and_leave_a_line(place: Path) -> None:
    async def main() -> None:
        async with running(place, Caller(Role.OPERATOR, name="spiffe://site/ops")) as agent:
            await agent.suspend("web")
            (line,) = agent.lines()
            assert (line["verb"], line["decision"], line["reason"]) == ("suspend", "allowed", "operation op1")
            assert (line["task"], line["containerd_namespace"]) == ("c1", "k8s.io")
            assert (line["caller"]["method"], line["caller"]["name"]) == ("Suspend", "spiffe://site/ops")
            assert line["requester"]["kind"] == "node"

    asyncio.run(main())


def test_defect_of_the_agent_is_in_the_log_and_not_in_the_answer(place: Path) -> None:
    async def main() -> None:
        async with running(place, ROOT) as agent:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await agent.suspend("broken")
            assert error.value.code() is grpc.StatusCode.INTERNAL
            assert "a defect" not in str(error.value.details())
            (line,) = (fields for _, event, fields in agent.log.lines if event == "call.failed")
            assert "a defect of the agent" in line["error"]
            assert agent.lines()[0]["decision"] == "failed"

    asyncio.run(main())


def test_refusals_without_end_do_not_fill_the_disk(place: Path) -> None:
    async def main() -> None:
        async with running(place, READER) as agent:
            for _ in range(REFUSALS_PER_MINUTE + 7):
                await agent.refused(agent.suspend())
            assert len(agent.lines()) == REFUSALS_PER_MINUTE
            agent.time[0] += 60
            await agent.refused(agent.suspend())
            assert "(and 7 refusals before it that have no line)" in agent.lines()[-1]["reason"]

    asyncio.run(main())


def test_container_is_heard_only_about_itself(place: Path) -> None:
    async def main() -> None:
        async with running(place, OWN) as agent:
            assert (await services.SelfStub(agent.channel).GetSelf(wire.GetSelfRequest(), timeout=10)).id == "c1"
            assert await agent.refused(agent.suspend()) is grpc.StatusCode.PERMISSION_DENIED
            assert agent.lines()[0]["caller"]["name"] == "container c1"

    asyncio.run(main())


def test_operator_is_no_container(place: Path) -> None:
    async def main() -> None:
        async with running(place, ROOT) as agent:
            call = services.SelfStub(agent.channel).GetSelf(wire.GetSelfRequest(), timeout=10)
            assert await agent.refused(call) is grpc.StatusCode.PERMISSION_DENIED

    asyncio.run(main())


def test_containers_of_pods_are_refused_until_the_settings_allow_them(place: Path) -> None:
    async def main() -> None:
        async with running(place, TENANT) as agent:
            stub = services.SelfStub(agent.channel)
            call = stub.Checkpoint(wire.SelfCheckpointRequest(), timeout=10)
            assert await agent.refused(call) is grpc.StatusCode.PERMISSION_DENIED
            agent.settings = replace(agent.settings, self_socket=SelfSocket(tenants=True))
            await stub.Checkpoint(wire.SelfCheckpointRequest(), timeout=10)
            refused, allowed = agent.lines()
            assert (refused["decision"], allowed["decision"]) == ("refused", "allowed")
            assert refused["requester"] == allowed["requester"]
            assert allowed["requester"] == {
                "kind": "tenant", "namespace": "team", "pod": "pod", "uid": "", "container": "app",
            }  # fmt: skip
            assert allowed["image"]["path"] == "/images/team/self"

    asyncio.run(main())


def test_container_has_a_rate_of_its_own(place: Path) -> None:
    async def main() -> None:
        async with running(place, OWN, replace(Settings(), self_socket=SelfSocket(calls_per_minute=3))) as agent:
            stub = services.SelfStub(agent.channel)
            for _ in range(3):
                await stub.GetSelf(wire.GetSelfRequest(), timeout=10)
            call = stub.GetSelf(wire.GetSelfRequest(), timeout=10)
            assert await agent.refused(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
            agent.time[0] += 20
            await stub.GetSelf(wire.GetSelfRequest(), timeout=10)

    asyncio.run(main())


def test_caller_that_is_gone_is_refused_and_noted(place: Path) -> None:
    async def main() -> None:
        async with running(place, OWN) as agent:
            agent.known.failure = Denied("process 12 has left container c1")
            call = services.SelfStub(agent.channel).Checkpoint(wire.SelfCheckpointRequest(), timeout=10)
            assert await agent.refused(call) is grpc.StatusCode.PERMISSION_DENIED
            (line,) = agent.lines()
            assert (line["decision"], line["reason"]) == ("refused", "process 12 has left container c1")

    asyncio.run(main())


def test_reader_has_so_many_calls_and_bytes_at_the_same_time(place: Path) -> None:
    async def main() -> None:
        async with running(place, READER) as agent:
            stub = services.OperationsStub(agent.channel)
            agent.access.weights = Weights(calls=1, bytes=1 << 20, all_bytes=1 << 20)
            agent.access.weights.begin(READER.key)
            with pytest.raises(grpc.aio.AioRpcError, match="1 calls at the same time already") as error:
                await stub.GetOperation(wire.GetOperationRequest(), timeout=10)
            assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            agent.access.weights.end(READER.key, 0)
            agent.access.weights.add(READER.key, 1 << 20)
            with pytest.raises(grpc.aio.AioRpcError, match="answers of 1 MiB wait for uid 1000 to read them"):
                await stub.GetOperation(wire.GetOperationRequest(), timeout=10)
            agent.access.weights.add(READER.key, -1 << 20)
            await stub.GetOperation(wire.GetOperationRequest(), timeout=10)
            assert [one async for one in stub.WatchOperation(wire.GetOperationRequest(), timeout=10)]
            await agent.forgotten()
            agent.known.who = ROOT
            agent.access.weights = Weights(calls=0, bytes=0, all_bytes=0)
            await stub.GetOperation(wire.GetOperationRequest(), timeout=10)

    asyncio.run(main())


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return a frame of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def silent_call(stream: int, method: str, request: bytes) -> bytes:
    """Return the frames of a call of gRPC, its headers without compression."""
    headers = {
        ":method": "POST", ":scheme": "http", ":path": f"/kybernate.node.v1.Operations/{method}",
        ":authority": "localhost", "te": "trailers", "content-type": "application/grpc",
    }  # fmt: skip
    block = b"".join(
        bytes((0, len(name))) + name.encode() + bytes((len(value),)) + value.encode() for name, value in headers.items()
    )
    body = bytes((0,)) + len(request).to_bytes(4, "big") + request
    return frame(1, 4, stream, block) + frame(0, 1, stream, body)


def test_answers_that_a_client_does_not_read_are_counted_until_it_is_gone(place: Path) -> None:
    async def main() -> None:
        async with running(place, READER) as agent:
            agent.access.weights = Weights(calls=20, bytes=10 << 20, all_bytes=10 << 20)
            method = next(name for name in RULES if name.endswith("/GetOperation"))
            assert method.startswith("/kybernate.node.v1.Operations/")
            reader, writer = await asyncio.open_unix_connection(f"{place}/s")
            no_window = frame(4, 0, 0, (4).to_bytes(2, "big") + bytes(4))
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + no_window)
            request = wire.GetOperationRequest(id="large").SerializeToString()
            for number in range(8):
                writer.write(silent_call(2 * number + 1, "GetOperation", request))
            await writer.drain()
            async with asyncio.timeout(10):
                while agent.access.weights._bytes[READER.key] < 8 << 20:
                    await reader.read(1 << 16)  # frames of the connection, and of refused calls
            assert agent.access.weights._bytes[READER.key] <= 10 << 20
            large = wire.GetOperationRequest(id="large")
            with pytest.raises(grpc.aio.AioRpcError, match="to read them"):
                await services.OperationsStub(agent.channel).GetOperation(large, timeout=10)
            writer.close()
            await agent.forgotten()

    asyncio.run(main())
