"""A tenant on the restricted socket of the node agent: other containers, floods, half connections, false identities."""

from __future__ import annotations

import array
import json
import os
import socket
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import psutil
import pytest

from kybernate.messages import agent_pb2 as wire
from kybernate_shim.linux.cgroup.hierarchies import directories, read_names
from tests.hostile.tenant import Tenant
from tests.system import node_agent
from tests.system.ctr import eventually
from tests.system.node_agent import NodeAgent, call, client, move

SLEEP = ("sleep", "600")
IMAGES = Path("/var/lib/kybernate/checkpoints")
SELF = call("Self", "GetSelf")
CHECKPOINT = call("Self", "Checkpoint", "SelfCheckpointRequest")
# Connects, passes the connection on through its standard input's socket, and ends or stays.
HANDS_ON = """
import array, socket, sys
own = socket.socket(socket.AF_UNIX)
own.connect(sys.argv[1])
socket.socket(fileno=0).sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [own.fileno()]))])
"""


@pytest.fixture
def place() -> Iterator[Path]:
    with node_agent.short_place() as directory:
        yield directory


@pytest.fixture
def agent(place: Path) -> Iterator[NodeAgent]:
    settings = f'[self_socket]\nenabled = true\ntenants = true\npath = "{place}/own/agent.sock"\n'
    with node_agent.running(place, settings + "calls_per_minute = 200\n") as running:
        yield running


def first_process(agent: NodeAgent, id: str) -> int:
    """Wait until the agent knows a container, and return its first process."""

    def known() -> int:
        found = agent.call("Inventory", "ListContainers", wire.ListContainersRequest()).containers
        return next((one.pid for one in found if one.id == id), 0)

    return eventually(known)


def test_container_is_itself_whatever_it_claims(agent: NodeAgent, tenant: Tenant, other_tenant: Tenant) -> None:
    mine = tenant.cri.run(tenant.pod(), "app", SLEEP)
    theirs = other_tenant.cri.run(other_tenant.pod(), "app", SLEEP)
    pid, other = first_process(agent, mine), first_process(agent, theirs)
    tricks = (
        [],
        ["env", f"--chdir=/proc/{other}/cwd/", f"CONTAINER_ID={theirs}"],
        ["unshare", "--pid", "--fork", "--mount-proc"],
        ["unshare", "--user", "--map-root-user"],
        ["unshare", "--cgroup", "--ipc", "--uts", "--net"],
        ["nsenter", "--target", str(other), "--ipc", "--uts"],
    )
    for trick in tricks:
        with client(agent.own_address, SELF, cgroups_of=pid, argv=trick) as process:
            answer = process.next()
            assert answer.get("id") == mine, (trick, answer)
    with client(agent.own_address, SELF, cgroups_of=other) as process:
        assert process.next()["id"] == theirs


@contextmanager
def cgroups_below(pid: int, other: int) -> Iterator[Callable[[int], None]]:
    """Make cgroups below those of `pid` whose names look like lines of /proc/PID/cgroup about `other`."""
    names, made = read_names(other), []
    hierarchies: dict[Path, list[str]] = {}
    for controller, directory in directories(pid).items():
        hierarchies.setdefault(directory, []).append(controller)
    for directory, controllers in hierarchies.items():
        forged = f"x\x1c9:{','.join(controllers)}:"
        made.append(directory / forged / names[controllers[0]].strip("/"))
        for one in [*reversed(made[-1].relative_to(directory).parents), made[-1].relative_to(directory)][1:]:
            (directory / one).mkdir(exist_ok=True)
            for file in ("cpuset.cpus", "cpuset.mems"):  # of version 1, no process comes in without
                if "cpuset" in controllers:
                    (directory / one / file).write_text((directory / file).read_text())

    def enter(process: int) -> None:
        for one in made:
            (one / "cgroup.procs").write_text(str(process))

    try:
        yield enter
    finally:
        for directory, one in zip(hierarchies, made, strict=True):
            while one != directory:
                eventually(lambda: not os.path.isdir(one) or not subprocess.run(["rmdir", one], check=False).returncode)  # noqa: B023, PTH112
                one = one.parent


def test_name_of_a_cgroup_makes_no_process_another_containers(
    agent: NodeAgent, tenant: Tenant, other_tenant: Tenant
) -> None:
    mine = tenant.cri.run(tenant.pod(), "app", SLEEP)
    theirs = other_tenant.cri.run(other_tenant.pod(), "app", SLEEP)
    pid, other = first_process(agent, mine), first_process(agent, theirs)
    with cgroups_below(pid, other) as enter, client(agent.own_address, SELF, cgroups_of=pid) as process:
        enter(process.process.pid)
        assert process.next().get("id") == mine


def test_idle_connections_to_the_metrics_cost_no_threads_and_keep_none_out(place: Path) -> None:
    listen = "127.0.0.1:7448"
    with node_agent.running(place, f'[metrics]\nlisten = "{listen}"\n') as agent, ExitStack() as ending:
        assert agent.process is not None
        before = psutil.Process(agent.process.pid).num_threads()
        for _ in range(1000):
            ending.enter_context(socket.create_connection(("127.0.0.1", 7448), 10))
        with urllib.request.urlopen(f"http://{listen}/metrics", timeout=20) as answer:
            assert b"kybernate_build_info" in answer.read()
        assert psutil.Process(agent.process.pid).num_threads() < before + 20
        assert len(os.listdir(f"/proc/{agent.process.pid}/fd")) < 300  # noqa: PTH208


def test_archive_with_headers_of_gigabytes_takes_no_memory(agent: NodeAgent, tmp_path: Path) -> None:
    assert agent.process is not None
    for kind in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE):
        header = tarfile.TarInfo("x")
        header.type, header.size = kind, 2 << 30
        (archive := tmp_path / "archive").write_bytes(header.tobuf(tarfile.GNU_FORMAT))
        os.truncate(archive, 3 << 30)
        with pytest.raises(grpc.RpcError) as refused:
            agent.call("Checkpoints", "ImportImage", wire.ImportImageRequest(path=str(archive)))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION  # type: ignore[attr-defined]
    assert psutil.Process(agent.process.pid).memory_info().rss < 500 << 20


def test_container_reaches_nothing_but_itself(agent: NodeAgent, tenant: Tenant, other_tenant: Tenant) -> None:
    mine = tenant.cri.run(tenant.pod(), "app", SLEEP)
    theirs = other_tenant.cri.run(other_tenant.pod(), "app", SLEEP)
    pid, _ = first_process(agent, mine), first_process(agent, theirs)
    of_root = agent.operation("Suspend", wire.SuspendRequest(name=theirs))
    calls = (
        call("Inventory", "ListContainers"),
        call("Operations", "Checkpoint", name=theirs, path="/etc/evil"),
        call("Operations", "GetOperation", id=of_root.id),
        call("Checkpoints", "ListImages"),
        call("Self", "GetOperation", id=of_root.id),
        call("Self", "CancelOperation", id=of_root.id),
    )
    with client(agent.own_address, *calls, cgroups_of=pid) as process:
        codes = [process.next().get("code") for _ in calls]
    assert codes == ["UNIMPLEMENTED"] * 4 + ["PERMISSION_DENIED"] * 2
    assert not Path("/etc/evil").exists()


def test_image_goes_to_the_own_namespace_under_a_name_of_the_agent(agent: NodeAgent, tenant: Tenant) -> None:
    mine = tenant.cri.run(tenant.pod(), "app", SLEEP)
    pid = first_process(agent, mine)
    request = call("Self", "Checkpoint", "SelfCheckpointRequest", options={"labels": {"path": "../../other"}})
    with client(agent.own_address, request, CHECKPOINT, cgroups_of=0) as stranger:
        assert stranger.next()["code"] == "UNAVAILABLE"  # it is in no container
    process = subprocess.Popen(["sleep", "60"])
    try:
        move(process.pid, pid)
    finally:
        process.kill()
        process.wait(10)
    with client(agent.own_address, request, cgroups_of=pid) as inhabitant:
        begun = inhabitant.next()
    assert Path(begun["image"]).parent == IMAGES / tenant.namespace
    assert Path(begun["image"]).name.startswith("self-app-")
    assert begun["requester"].startswith(f"container {mine} ")
    ended = agent.ended(begun["id"])
    assert ended.state in (wire.SUCCEEDED, wire.FAILED)
    for image in (IMAGES / tenant.namespace).glob("self-*"):  # the registry may just write next to it
        eventually(lambda: not subprocess.run(["rm", "-rf", image], check=False).returncode)  # noqa: B023  # asked now


def test_process_that_moves_to_another_container_is_refused(
    agent: NodeAgent, tenant: Tenant, other_tenant: Tenant
) -> None:
    mine = tenant.cri.run(tenant.pod(), "app", SLEEP)
    theirs = other_tenant.cri.run(other_tenant.pod(), "app", SLEEP)
    pid, other = first_process(agent, mine), first_process(agent, theirs)
    with client(agent.own_address, SELF, SELF, CHECKPOINT, cgroups_of=pid) as process:
        assert process.next()["id"] == mine
        move(process.process.pid, other)
        assert process.next()["code"] == "PERMISSION_DENIED"
        assert process.next()["code"] == "PERMISSION_DENIED"


def test_connection_that_a_dead_process_has_left_is_worthless(agent: NodeAgent, tenant: Tenant) -> None:
    """Another process speaks through it, which is in no container at all."""
    pid = first_process(agent, tenant.cri.run(tenant.pod(), "app", SLEEP))
    ours, its = socket.socketpair()
    path = agent.own_address.removeprefix("unix:")
    process = subprocess.Popen(
        [sys.executable, "-c", HANDS_ON, path], stdin=its, preexec_fn=lambda: move(os.getpid(), pid)
    )
    its.close()
    _, ancillary, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(4))
    process.wait(10)
    with ours, socket.socket(fileno=array.array("i", ancillary[0][2])[0]) as left:
        left.settimeout(20)
        answer = b""
        with suppress(ConnectionResetError, BrokenPipeError):  # the agent has closed it, before or after it read some
            left.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
            left.sendall(_get_self())
            while b"has ended" not in answer and (more := left.recv(4096)):
                answer += more
    assert tenant.namespace.encode() not in answer


def _get_self() -> bytes:
    """Return the frames of a call of GetSelf, with headers that are not compressed. Source: RFC 7541, RFC 9113."""
    pairs = ((":method", "POST"), (":scheme", "http"), (":path", "/kybernate.node.v1.Self/GetSelf"),
             (":authority", "localhost"), ("te", "trailers"), ("content-type", "application/grpc"))  # fmt: skip
    block = b"".join(b"\0" + bytes([len(n)]) + n.encode() + bytes([len(v)]) + v.encode() for n, v in pairs)
    headers = len(block).to_bytes(3, "big") + b"\x01\x04" + (1).to_bytes(4, "big") + block
    return headers + b"\0\0\x05\0\x01" + (1).to_bytes(4, "big") + bytes(5)


def test_flood_of_connections_and_halves_of_them_hurts_the_flooder_alone(
    agent: NodeAgent, tenant: Tenant, other_tenant: Tenant
) -> None:
    mine = tenant.cri.run(tenant.pod(), "app", SLEEP)
    theirs = other_tenant.cri.run(other_tenant.pod(), "app", SLEEP)
    pid, other = first_process(agent, mine), first_process(agent, theirs)
    flood = (
        "import socket, sys\nheld = []\n"
        "for number in range(500):\n"
        "    one = socket.socket(socket.AF_UNIX); one.connect(sys.argv[1]); held.append(one)\n"
        "    try: number % 2 and one.send(b'PRI * HTTP/2.0')\n"
        "    except OSError: pass\n"
        "print(flush=True); input()\n"
    )
    path = agent.own_address.removeprefix("unix:")
    with ExitStack() as ending:
        flooder = subprocess.Popen(
            [sys.executable, "-c", flood, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            preexec_fn=lambda: move(os.getpid(), pid),
        )  # fmt: skip
        ending.callback(flooder.communicate, b"\n", 10)
        ending.callback(flooder.kill)
        assert flooder.stdout is not None
        flooder.stdout.readline()
        with client(agent.own_address, SELF, cgroups_of=other) as process:
            assert process.next()["id"] == theirs
        assert agent.checked() == 1
        assert len(os.listdir(f"/proc/{agent.process.pid}/fd")) < 200  # type: ignore[union-attr]  # noqa: PTH208


def test_calls_without_end_are_refused_after_some(agent: NodeAgent, tenant: Tenant) -> None:
    pid = first_process(agent, tenant.cri.run(tenant.pod(), "app", SLEEP))
    with client(agent.own_address, *([SELF] * 260), cgroups_of=pid) as process:
        answers = [process.next().get("code", "") for _ in range(260)]
    assert answers[:100] == [""] * 100
    assert "RESOURCE_EXHAUSTED" in answers
    assert agent.checked() == 1


def test_tenants_are_refused_where_the_settings_do_not_allow_them(place: Path, tenant: Tenant) -> None:
    settings = f'[self_socket]\nenabled = true\npath = "{place}/own/agent.sock"\n'
    with node_agent.running(place, settings) as agent:
        pid = first_process(agent, tenant.cri.run(tenant.pod(), "app", SLEEP))
        with client(agent.own_address, SELF, CHECKPOINT, cgroups_of=pid) as process:
            assert process.next()["code"] == "PERMISSION_DENIED"
            assert process.next()["code"] == "PERMISSION_DENIED"
        lines = [json.loads(line) for line in Path("/var/log/kybernate/audit.jsonl").read_text().splitlines()]
        assert (lines[-1]["decision"], lines[-1]["requester"]["namespace"]) == ("refused", tenant.namespace)


def test_sockets_of_grpc_are_out_of_reach(agent: NodeAgent) -> None:
    private = agent.place / "run/agent.private"
    assert private.stat().st_mode & 0o777 == 0o700
    address = f"unix:{private}/agent.sock"
    with client(address, call("Inventory", "ListContainers"), user=1000, group=1000, extra_groups=[]) as other:
        assert other.next()["code"] == "UNAVAILABLE"
    with client(address, call("Inventory", "ListContainers")) as root:
        assert root.next()["code"] == "PERMISSION_DENIED"  # it did not come through the agent's own socket
