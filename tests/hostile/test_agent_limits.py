"""What tenants, peers and clients ask of a real agent without measure: each one's limit is its own."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from kybernate.agent.journal import Journal
from kybernate.agent.operations.store import MOST_LIST, SCHEMA, _insert
from kybernate.agent.service.operations import MOST_LIST_BYTES
from kybernate.messages import agent_pb2 as wire
from kybernate.messages import agent_pb2_grpc as services
from kybernate.verbs.checkpoint import Checkpoint
from kybernate.verbs.model import Fault, Operation, State, Target
from tests.hostile.tenant import Tenant
from tests.hostile.test_agent import CHECKPOINT, IMAGES, SELF, SLEEP, first_process
from tests.system import node_agent
from tests.system.ctr import eventually, run
from tests.system.node_agent import NodeAgent, call, client
from tests.unit.agent.access.authority import Authority

PORT = 7444
MANY = 2000


@pytest.fixture
def place() -> Iterator[Path]:
    with node_agent.short_place() as directory:
        yield directory


@pytest.fixture
def agent(place: Path) -> Iterator[NodeAgent]:
    settings = f'[self_socket]\nenabled = true\ntenants = true\nquota = "1MiB"\npath = "{place}/own/agent.sock"\n'
    with node_agent.running(place, settings) as running:
        yield running


@pytest.fixture
def ca(place: Path) -> Authority:
    ca = Authority()
    ca.write(place, "localhost")
    return ca


@pytest.fixture
def tls(place: Path, ca: Authority) -> Iterator[NodeAgent]:
    settings = (
        f'[tls]\nlisten = "127.0.0.1:{PORT}"\ncertificate = "{place}/certificate"\nkey = "{place}/key"\n'
        f'client_ca = "{place}/client_ca"\noperators = ["ops-*.example.org"]\nreaders = ["spiffe://org/*/reads"]\n'
    )
    with node_agent.running(place, settings) as running:
        yield running


def answered(credentials: grpc.ChannelCredentials, ask: Callable[[grpc.Channel], object]) -> str:
    """Return the code with which a client on the TLS port is answered."""
    with grpc.secure_channel(f"localhost:{PORT}", credentials) as channel:
        try:
            ask(channel)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"


def looks(channel: grpc.Channel) -> object:
    return services.InventoryStub(channel).ListContainers(wire.ListContainersRequest(), timeout=20)


def acts(channel: grpc.Channel) -> object:
    return services.OperationsStub(channel).Suspend(wire.SuspendRequest(name="none"), timeout=20)


# ---- operations


def filled(directory: Path) -> None:
    """Write the journal of an agent whose tenants have asked for thousands of operations after another one's."""

    def operation(number: int) -> Operation:
        container = "small" if number == 0 else f"big{number % 4}"
        return Operation(
            id=f"{number:026}",
            arguments=Checkpoint(container, path=f"/images/{number}"),
            target=Target(namespace="k8s.io", container=container, title=container),
            created=time.time(),
            ended=time.time(),
            state=State.FAILED,
            fault=Fault("ShimRefused", "y" * 2000),
            labels={f"label{one}": "x" * 250 for one in range(200)},
            revision=1,
        )

    directory.mkdir(parents=True, mode=0o700)
    journal = Journal(directory / "journal.db", SCHEMA)
    try:
        asyncio.run(journal.run(lambda connection: [_insert(connection, operation(one)) for one in range(MANY)]))
    finally:
        journal.close()


def listed(agent: NodeAgent, **fields: Any) -> wire.ListOperationsResponse:
    """Return operations, as a client that takes large answers."""
    with grpc.insecure_channel(agent.address, options=[("grpc.max_receive_message_length", 64 << 20)]) as channel:
        answer: wire.ListOperationsResponse = services.OperationsStub(channel).ListOperations(
            wire.ListOperationsRequest(**fields), timeout=60
        )
    return answer


def test_thousands_of_large_operations_are_listed_in_parts_and_hide_no_others(place: Path) -> None:
    filled(place / "state")
    with node_agent.running(place) as agent:
        assert agent.process is not None
        seen: list[str] = []
        before = ""
        while True:
            answer = listed(agent, limit=MOST_LIST, before=before)
            if not answer.operations:
                break
            assert len(answer.operations) <= MOST_LIST
            assert answer.ByteSize() <= MOST_LIST_BYTES
            seen += [one.id for one in answer.operations]
            before = seen[-1]
        assert seen == [f"{number:026}" for number in reversed(range(MANY))]
        (other,) = listed(agent, container="small").operations
        assert other.id == seen[-1]
        environment = ["env", f"KYBERNATE_AGENT={agent.address}"]
        (shown,) = json.loads(run([*environment, "kybernate", "ops", "small", "-o", "json"]))
        assert shown["id"] == other.id
        assert len(json.loads(run([*environment, "kybernate", "ops", "-o", "json", "--limit", "1000"]))) > 100
        assert psutil.Process(agent.process.pid).memory_info().rss < 500 << 20


@pytest.mark.parametrize(
    "options",
    [
        {"labels": {"a": "x" * 50_000}},
        {"labels": {f"l{n}": "x" for n in range(1000)}},
        {"idempotency_key": "k" * 50_000},
    ],
)
def test_container_journals_nothing_large(agent: NodeAgent, tenant: Tenant, options: dict[str, object]) -> None:
    pid = first_process(agent, tenant.cri.run(tenant.pod(), "app", SLEEP))
    with client(
        agent.own_address, call("Self", "Checkpoint", "SelfCheckpointRequest", options=options), cgroups_of=pid
    ) as one:
        assert one.next()["code"] == "INVALID_ARGUMENT"
    assert not agent.call("Operations", "ListOperations", wire.ListOperationsRequest()).operations


# ---- quota


def test_containers_that_ask_together_have_one_quota_and_no_other_namespaces(
    agent: NodeAgent, tenant: Tenant, other_tenant: Tenant
) -> None:
    """The memory of each is more than the quota, whichever asks first; nothing of it is another one's affair."""
    pod = tenant.pod()
    pids = [first_process(agent, tenant.cri.run(pod, f"app{number}", SLEEP)) for number in range(3)]
    with ExitStack() as ending:
        clients = [ending.enter_context(client(agent.own_address, CHECKPOINT, cgroups_of=pid)) for pid in pids]
        answers = [one.next() for one in clients]
        assert {one.get("code") for one in answers} == {"RESOURCE_EXHAUSTED"}, answers
    assert not list((IMAGES / tenant.namespace).glob("self-*"))
    other = first_process(agent, other_tenant.cri.run(other_tenant.pod(), "app", SLEEP))
    with client(agent.own_address, SELF, cgroups_of=other) as one:
        assert one.next()["pod_namespace"] == other_tenant.namespace


# ---- TLS


@pytest.mark.parametrize(
    ("names", "looking", "acting"),
    [
        (["ops-a.example.org"], "OK", "NOT_FOUND"),
        (["ops-a.evil.example.org"], "PERMISSION_DENIED", "PERMISSION_DENIED"),
        (["ops-a.example.org.evil"], "PERMISSION_DENIED", "PERMISSION_DENIED"),
        (["xops-a.example.org"], "PERMISSION_DENIED", "PERMISSION_DENIED"),
        (["https://ops-a.example.org"], "PERMISSION_DENIED", "PERMISSION_DENIED"),
        (["spiffe://org/team/reads"], "OK", "PERMISSION_DENIED"),
        (["spiffe://org/team/x/reads"], "PERMISSION_DENIED", "PERMISSION_DENIED"),
        (["spiffe://org//reads"], "PERMISSION_DENIED", "PERMISSION_DENIED"),
        ([], "PERMISSION_DENIED", "PERMISSION_DENIED"),
    ],
)
def test_role_is_that_of_the_whole_name(
    tls: NodeAgent, ca: Authority, names: list[str], looking: str, acting: str
) -> None:
    credentials = ca.client(*names)
    assert (answered(credentials, looks), answered(credentials, acts)) == (looking, acting)


def test_certificate_of_another_authority_is_none(tls: NodeAgent, ca: Authority) -> None:
    stranger = Authority("CA of the tests").client("ops-a.example.org", trusts=ca)
    assert answered(stranger, looks) == "UNAVAILABLE"
    assert answered(grpc.ssl_channel_credentials(ca.certificate), looks) == "UNAVAILABLE"


def test_handshakes_that_do_not_end_keep_no_peer_out(tls: NodeAgent, ca: Authority) -> None:
    assert tls.process is not None
    with ExitStack() as ending:
        for number in range(600):
            one = ending.enter_context(socket.create_connection(("127.0.0.1", PORT), 20))
            if number % 3 == 0:
                one.sendall(b"\x16\x03\x01\x40\x00\x01\x00")  # the begin of a hello, as long as one may be
        assert answered(ca.client("ops-a.example.org"), looks) == "OK"
        assert len(psutil.Process(tls.process.pid).net_connections("tcp")) < 350


def test_renegotiation_and_old_versions_are_refused(tls: NodeAgent, ca: Authority) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection(("127.0.0.1", PORT), 20) as plain, pytest.raises((ssl.SSLError, OSError)):
        context.wrap_socket(plain).close()
    assert answered(ca.client("ops-a.example.org"), looks) == "OK"


# ---- gzip


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_request_that_unpacks_to_more_is_refused_by_its_size(agent: NodeAgent, algorithm: grpc.Compression) -> None:
    assert agent.process is not None
    bomb = wire.SuspendRequest(name="x" * (512 << 20))
    with grpc.insecure_channel(
        agent.address, compression=algorithm, options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        stub = services.OperationsStub(channel)
        for _ in range(4):
            with pytest.raises(grpc.RpcError) as refused:
                stub.Suspend(bomb, timeout=60)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
    assert agent.checked() == 1
    eventually(lambda: psutil.Process(agent.process.pid).memory_info().rss < 400 << 20)  # type: ignore[union-attr]
