"""The agent's sockets in front of a real gRPC server: who is behind a call, and what a client can hold up."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import grpc
import pytest

from kybernate.agent.access import entry_points, relay
from kybernate.agent.access.entry_points import CertificateEntryPoint, ContainerEntryPoint, UserEntryPoint
from kybernate.agent.access.front import REFUSALS_PER_MINUTE
from kybernate.agent.access.own_container import container_of
from kybernate.agent.access.relay import PREFACE
from kybernate.agent.settings import Settings, Tls
from kybernate.messages.agent_pb2 import Container
from tests.unit.agent.access.authority import Authority
from tests.unit.agent.access.conftest import Served, channel, serving, soon, unix_listener, who


@asynccontextmanager
async def users(place: Path, settings: Settings = Settings()) -> AsyncIterator[Served]:  # noqa: B008  # frozen
    entry_point = UserEntryPoint(lambda: settings, readers=None)
    async with serving(place, unix_listener(place / "s"), entry_point, f"unix:{place}/s") as served:
        yield served


async def connect(place: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_unix_connection(place / "s")


def test_caller_is_the_process_that_has_connected(place: Path) -> None:
    async def main() -> None:
        async with users(place) as served:
            assert await served.ask() == f"uid {os.getuid()} (pid {os.getpid()})"
            assert await served.ask() == f"uid {os.getuid()} (pid {os.getpid()})"
            first, second = served.servicer.peers
            assert first != second

    asyncio.run(main())


def test_callers_at_the_same_time_are_told_apart(place: Path) -> None:
    program = (
        "import grpc, sys; from grpc_health.v1 import health_pb2, health_pb2_grpc\n"
        "stub = health_pb2_grpc.HealthStub(grpc.insecure_channel(sys.argv[1]))\n"
        "for _ in range(3):\n"
        "    try: stub.Check(health_pb2.HealthCheckRequest(), timeout=20)\n"
        "    except grpc.RpcError as error: print(error.details())\n"
    )

    async def main() -> None:
        async with users(place) as served:
            argv = [sys.executable, "-c", program, served.address]
            others = [await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE) for _ in range(3)]
            said = await asyncio.gather(*(other.communicate() for other in others), served.ask())
            for other, (out, _) in zip(others, said[:-1], strict=True):
                assert out.decode().splitlines() == [f"uid {os.getuid()} (pid {other.pid})"] * 3
            assert said[-1] == f"uid {os.getuid()} (pid {os.getpid()})"

    asyncio.run(main())


def test_client_that_sends_nothing_keeps_no_place(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "PREFACE_SECONDS", 0.2)

    async def main() -> None:
        async with users(place) as served:
            reader, writer = await connect(place)
            writer.write(PREFACE[:5])
            assert await reader.read() == b""
            assert "sent nothing, or too little" in served.log.reasons()[0]
            writer.close()

    asyncio.run(main())


def test_process_that_only_looks_whether_the_agent_runs_is_no_noise(place: Path) -> None:
    async def main() -> None:
        async with users(place) as served:
            for sent in (b"", PREFACE[:5]):
                reader, writer = await connect(place)
                writer.write(sent)
                writer.write_eof()
                assert await reader.read() == b""
                writer.close()
            assert served.log.reasons() == ["it has sent too little"]

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("begin", [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\0" * 24, b"\x16\x03\x01" + b"x" * 40])
def test_what_is_no_client_of_grpc_is_cut_off(place: Path, begin: bytes) -> None:
    async def main() -> None:
        async with users(place) as served:
            reader, writer = await connect(place)
            writer.write(begin)
            assert await reader.read() == b""
            assert served.log.reasons() == ["it does not speak HTTP/2"]
            assert not served.servicer.peers
            writer.close()

    asyncio.run(main())


def test_connections_beyond_the_limit_end_and_places_come_back(place: Path) -> None:
    async def main() -> None:
        async with users(place, replace(Settings(), connections=3)) as served:
            held = [await connect(place) for _ in range(3)]
            reader, writer = await connect(place)
            assert await reader.read() == b""
            assert f"uid {os.getuid()} has 3 connections" in served.log.reasons()[0]
            writer.close()
            for _, one in held:
                one.close()
            await soon(lambda: not served.front.entry_point.places._taken)  # type: ignore[attr-defined]
            assert await served.ask() == f"uid {os.getuid()} (pid {os.getpid()})"

    asyncio.run(main())


def test_client_that_reads_nothing_does_not_hold_up_others_or_the_end(place: Path) -> None:
    async def main() -> None:
        async with users(place) as served:
            _, writer = await connect(place)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            ping = b"\0\0\x08\x06\0\0\0\0\0" + b"x" * 8  # each is answered
            writer.write(PREFACE + b"\0\0\0\x04\0\0\0\0\0" + ping * 20000)
            assert await served.ask() == f"uid {os.getuid()} (pid {os.getpid()})"
        writer.close()

    asyncio.run(main())


def test_large_messages_pass_whole(place: Path) -> None:
    async def main() -> None:
        async with users(place) as served, channel(served.address) as one:
            call = one.unary_unary("/grpc.health.v1.Health/Nothing")
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call(os.urandom(3 << 20), timeout=20)
            assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert await who(one) == f"uid {os.getuid()} (pid {os.getpid()})"

    asyncio.run(main())


# ---- containers


CGROUPS = {"": "/pods/c1", "memory": "/pods/c1"}


@pytest.fixture
def in_a_container(monkeypatch: pytest.MonkeyPatch) -> Container:
    """The container of this process, as far as the cgroups of the test say; tests/hostile has the kernel's own."""

    def read(pid: int) -> Mapping[str, str]:
        if pid != os.getpid():
            raise ProcessLookupError(pid)
        return CGROUPS

    monkeypatch.setattr(entry_points, "container_of", partial(container_of, read=read))
    return Container(namespace="default", id="c1", pid=os.getpid())


def test_process_of_a_container_is_known_until_the_container_is_another(place: Path, in_a_container: Container) -> None:
    async def main() -> None:
        entry_point = ContainerEntryPoint(lambda: [in_a_container])
        address = f"unix:{place}/s"
        async with serving(place, unix_listener(place / "s"), entry_point, address), channel(address) as one:
            assert await who(one) == f"container c1 (pid {os.getpid()})"
            in_a_container.pid = 1 << 21
            with pytest.raises(grpc.aio.AioRpcError, match="no cgroup of a container"):
                await who(one)

    asyncio.run(main())


def test_process_of_no_container_does_not_get_through(place: Path) -> None:
    async def main() -> None:
        entry_point = ContainerEntryPoint(lambda: [Container(namespace="default", id="another", pid=os.getpid())])
        async with serving(place, unix_listener(place / "s"), entry_point, f"unix:{place}/s") as served:
            reader, writer = await connect(place)
            assert await reader.read() == b""
            assert "no cgroup of a container" in served.log.reasons()[0]
            writer.close()

    asyncio.run(main())


# ---- certificates


@asynccontextmanager
async def secured(place: Path, authority: Authority, **roles: tuple[str, ...]) -> AsyncIterator[Served]:
    authority.write(place, "localhost")
    tls = Tls("localhost:0", place / "certificate", place / "key", place / "client_ca", **roles)
    settings = replace(Settings(), tls=tls)
    listener = socket.create_server(("127.0.0.1", 0))
    served: Served
    entry_point = CertificateEntryPoint(lambda: settings, lambda: served.front.end_all())
    async with serving(place, listener, entry_point, f"localhost:{listener.getsockname()[1]}") as served:
        yield served


def test_names_of_a_certificate_decide_the_role(place: Path) -> None:
    ca = Authority()

    async def main() -> None:
        async with secured(place, ca, operators=("spiffe://site/ops",), readers=("*.example",)) as served:
            assert await served.ask(ca.client("spiffe://site/ops")) == "spiffe://site/ops (operator)"
            assert await served.ask(ca.client("a.example")) == "a.example (reader)"
            assert await served.ask(ca.client("elsewhere")) == "elsewhere (none)"
            assert await served.ask(ca.client()) == "a certificate without names (none)"

    asyncio.run(main())


def test_refusals_without_end_fill_no_log(place: Path) -> None:
    async def main() -> None:
        entry_point = ContainerEntryPoint(list)
        async with serving(place, unix_listener(place / "s"), entry_point, f"unix:{place}/s") as served:
            for _ in range(3 * REFUSALS_PER_MINUTE):
                reader, writer = await connect(place)
                assert await reader.read() == b""
                writer.close()
            assert REFUSALS_PER_MINUTE <= len(served.log.reasons()) < 2 * REFUSALS_PER_MINUTE

    asyncio.run(main())


def test_silent_connections_of_its_address_keep_no_client_out(place: Path) -> None:
    ca = Authority()

    async def main() -> None:
        async with secured(place, ca, operators=("*",)) as served:
            port = int(served.address.rpartition(":")[2])
            silent = [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(2 * Settings().connections)]
            assert await served.ask(ca.client("a"), seconds=5) == "a (operator)"
            assert any("gave way to newer ones" in reason for reason in served.log.reasons())
            for writer in silent:
                writer.close()

    asyncio.run(main())


def test_client_of_another_ca_or_without_certificate_does_not_get_through(place: Path) -> None:
    ca, other = Authority(), Authority("another")

    async def main() -> None:
        async with secured(place, ca, operators=("*",)) as served:
            for stranger in (other.client("a", trusts=ca), grpc.ssl_channel_credentials(ca.certificate), None):
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await served.ask(stranger, seconds=5)
                assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            assert not served.servicer.peers
            assert await served.ask(ca.client("a")) == "a (operator)"

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_tls_before_1_2_is_refused(place: Path) -> None:
    ca = Authority()

    def handshake(port: int, highest: ssl.TLSVersion) -> str | None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.minimum_version, context.maximum_version = ssl.TLSVersion.MINIMUM_SUPPORTED, highest
        context.load_cert_chain(place / "certificate", place / "key")
        with socket.create_connection(("127.0.0.1", port)) as raw, context.wrap_socket(raw) as one:
            return one.version()

    async def main() -> None:
        async with secured(place, ca) as served:
            port = int(served.address.rpartition(":")[2])
            assert await asyncio.to_thread(handshake, port, ssl.TLSVersion.TLSv1_2) == "TLSv1.2"
            with pytest.raises(ssl.SSLError):
                await asyncio.to_thread(handshake, port, ssl.TLSVersion.TLSv1_1)
            assert "UNSUPPORTED_PROTOCOL" in served.log.reasons()[-1]

    asyncio.run(main())


def test_changed_ca_ends_the_clients_of_the_former_one(place: Path) -> None:
    ca, other = Authority(), Authority("another")
    mine, theirs = ca.client("a", trusts=other), other.client("b")

    async def main() -> None:
        async with secured(place, ca, operators=("*",)) as served:
            async with channel(served.address, ca.client("a")) as old:
                assert await who(old) == "a (operator)"
                other.write(place, "localhost")
                assert await served.ask(theirs) == "b (operator)"
                with pytest.raises(grpc.aio.AioRpcError):
                    await who(old, seconds=3)
            with pytest.raises(grpc.aio.AioRpcError):
                await served.ask(mine, seconds=3)

    asyncio.run(main())


def test_key_that_others_can_read_is_not_used(place: Path) -> None:
    ca = Authority()

    async def main() -> None:
        async with secured(place, ca, operators=("*",)) as served:
            (place / "key").chmod(0o640)
            with pytest.raises(grpc.aio.AioRpcError):
                await served.ask(ca.client("a"), seconds=3)
            assert "can be read by other users" in served.log.reasons()[0]
            (place / "key").chmod(0o600)
            assert await served.ask(ca.client("a")) == "a (operator)"

    asyncio.run(main())


def test_connection_ends_with_its_certificate() -> None:
    def holder(end: str) -> entry_points.Holder:
        return entry_points.Holder({"subjectAltName": (("DNS", "a"),), "notAfter": end}, Settings)

    assert str(holder("Jan  1 00:00:00 2099 GMT").caller()) == "a (none)"
    with pytest.raises(entry_points.CertificateExpired, match="of a has expired"):
        holder("Jan  1 00:00:00 2020 GMT").caller()


def test_expired_certificate_does_not_get_through(place: Path) -> None:
    ca = Authority()
    key, certificate = ca.issue("a", lasts=timedelta(days=-1))

    async def main() -> None:
        async with secured(place, ca, operators=("*",)) as served:
            with pytest.raises(grpc.aio.AioRpcError):
                await served.ask(grpc.ssl_channel_credentials(ca.certificate, key, certificate), seconds=3)

    asyncio.run(main())


def test_handshake_that_dribbles_ends(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes soon after the one before, and the last one never."""
    monkeypatch.setattr(entry_points, "HANDSHAKE_SECONDS", 0.3)
    ca = Authority()

    async def main() -> None:
        async with secured(place, ca, operators=("*",)) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(served.address.rpartition(":")[2]))
            writer.write(b"\x16\x03\x01\x40\x00\x01\x00")  # the begin of a hello of 16 KiB
            ended = asyncio.ensure_future(reader.read())
            while not ended.done():
                writer.write(b"\0")
                await asyncio.wait({ended}, timeout=0.01)
            with suppress(ConnectionError):
                assert ended.result() == b""
            writer.close()
            assert await served.ask(ca.client("a")) == "a (operator)"

    asyncio.run(asyncio.wait_for(main(), 20))


def test_idle_connections_of_a_certificate_keep_no_other_out(place: Path) -> None:
    ca, most = Authority(), Settings().connections
    ca.write(place, "idle")
    context = ssl.create_default_context(cafile=str(place / "client_ca"))
    context.check_hostname = False
    context.load_cert_chain(place / "certificate", place / "key")

    async def main() -> None:
        async with secured(place, ca, operators=("*",)) as served:
            port = int(served.address.rpartition(":")[2])
            idle = [await asyncio.open_connection("127.0.0.1", port, ssl=context) for _ in range(2 * most)]
            await soon(lambda: sum("connections already" in reason for reason in served.log.reasons()) == most)
            assert len(served.front.callers._known) <= most + 1
            assert await served.ask(ca.client("a")) == "a (operator)"
            for _, writer in idle:
                writer.transport.abort()

    asyncio.run(main())


def test_renegotiation_is_refused(place: Path) -> None:
    """Each one would cost the agent much more than its client, on one connection for as long as that likes."""
    if shutil.which("openssl") is None:
        pytest.skip("renegotiates by the program openssl")
    ca = Authority()

    async def main() -> None:
        async with secured(place, ca, operators=("*",)) as served:
            argv = ["openssl", "s_client", "-tls1_2", "-connect", f"127.0.0.1:{served.address.rpartition(':')[2]}"]
            files = ["-cert", place / "certificate", "-key", place / "key", "-CAfile", place / "client_ca"]
            client = await asyncio.create_subprocess_exec(
                *argv, *files, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            assert client.stdin is not None
            assert client.stdout is not None
            said = b""
            while b"Verify return code" not in said:
                said += (line := await client.stdout.readline())
                assert line, said
            client.stdin.write(b"R\n")
            said = (await client.communicate())[0]
            assert b"no renegotiation" in said
            assert await served.ask(ca.client("a")) == "a (operator)"

    asyncio.run(asyncio.wait_for(main(), 30))
