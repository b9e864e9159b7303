"""The node agent against real containerd and shims, called by gRPC as its clients do."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kybernate.messages import agent_pb2 as wire
from kybernate.messages import agent_pb2_grpc as services
from tests.system import gpu, node_agent
from tests.system.checkpoints import assert_no_image, assert_whole, counting, holding, kybernate
from tests.system.ctr import Ctr, eventually, run
from tests.system.node_agent import NodeAgent, call, client
from tests.unit.agent.access.authority import Authority

GROUP = 4242
AUDIT = Path("/var/log/kybernate/audit.jsonl")


@pytest.fixture
def place() -> Iterator[Path]:
    with node_agent.short_place() as directory:
        yield directory


@pytest.fixture
def agent(place: Path) -> Iterator[NodeAgent]:
    with node_agent.running(place) as running:
        yield running


@pytest.fixture
def readers() -> Iterator[int]:
    """The group whose members may look."""
    run(["groupadd", "--gid", str(GROUP), "kybernate"])
    yield GROUP
    run(["groupdel", "kybernate"])


def test_container_is_checkpointed_and_restored(agent: NodeAgent, ours: Ctr, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with counting(ours, log=log) as witness:
        eventually(lambda: agent.call("Inventory", "GetContainer", wire.GetContainerRequest(name=witness.id)).pid)
        request = wire.CheckpointRequest(name=witness.id, path=str(tmp_path / "image"), exit=True)
        request.options.idempotency_key = "once"
        begun = agent.operation("Checkpoint", request)
        assert begun.requester == f"uid 0 (pid {os.getpid()})"
        assert agent.operation("Checkpoint", request).id == begun.id
        with grpc.insecure_channel(agent.address) as channel:
            watched = services.OperationsStub(channel).WatchOperation(wire.GetOperationRequest(id=begun.id), timeout=60)
            *_, last = watched
        assert last.state == wire.SUCCEEDED, last
        assert {step.name for step in last.steps} >= {"freeze", "dump"}
        assert_whole(tmp_path / "image")
        images = eventually(lambda: agent.call("Checkpoints", "ListImages", wire.ListImagesRequest()).images)
        assert [one.place for one in images[0].replicas] == [str(tmp_path / "image")]
        assert images[0].source.container == witness.id
        last_number = witness.count()
    again = ours.new_id("again")
    copy = tmp_path / "log.again"
    restore = wire.RestoreRequest(image=str(tmp_path / "image"), name=again, log_path=str(copy))
    try:
        agent.done(agent.operation("Restore", restore).id)
        numbers = eventually(lambda: [int(line) for line in copy.read_text().split("\n")[:-1]][2:])
        assert numbers[0] > last_number
        found = agent.call("Inventory", "GetContainer", wire.GetContainerRequest(name=again))
        assert found.state == wire.Container.RUNNING
    finally:
        ours.remove(again)
    kybernate("ps")


def test_all_that_changes_is_seen_by_who_watches(agent: NodeAgent, ours: Ctr) -> None:
    with grpc.insecure_channel(agent.address) as channel:
        changes = services.InventoryStub(channel).Watch(wire.WatchRequest(kinds=["container"]), timeout=60)
        with counting(ours) as witness:
            running = next(
                one.container
                for one in changes
                if one.container.id == witness.id and one.container.state == wire.Container.RUNNING
            )
            assert running.pid == ours.pid(witness.id)
        assert next(one for one in changes if one.removed and one.container.id == witness.id)
        changes.cancel()


@pytest.mark.parametrize("killed", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_operation_outlives_the_agent(place: Path, ours: Ctr, tmp_path: Path, killed: int) -> None:
    with (
        node_agent.running(place, "[operations]\ndrain = 0") as agent,
        holding(ours, 256) as witness,
    ):
        request = wire.CheckpointRequest(name=witness.id, path=str(tmp_path / "image"))
        begun = agent.operation("Checkpoint", request)
        agent.until(begun.id, lambda one: one.state != wire.PENDING)
        agent.stop(killed)
        agent.start()
        agent.wait_ready()
        ended = agent.done(begun.id)
        assert ended.result.path == str(tmp_path / "image")
        assert_whole(tmp_path / "image")
        witness.assert_goes_on()


def test_cancelled_checkpoint_leaves_nothing(agent: NodeAgent, ours: Ctr, tmp_path: Path) -> None:
    with holding(ours, 512) as witness:
        begun = agent.operation("Checkpoint", wire.CheckpointRequest(name=witness.id, path=str(tmp_path / "image")))
        agent.until(begun.id, lambda one: one.state != wire.PENDING)
        agent.operation("CancelOperation", wire.CancelOperationRequest(id=begun.id))
        ended = agent.ended(begun.id)
        if ended.state == wire.CANCELLED:
            assert_no_image(tmp_path / "image")
        else:
            assert ended.state == wire.SUCCEEDED, ended
            assert_whole(tmp_path / "image")
        witness.assert_goes_on()


def test_container_is_suspended_and_resumed_by_the_agent(agent: NodeAgent, ours: Ctr) -> None:
    gpus = gpu.install_driver()
    try:
        with gpu.computing(ours) as container:
            used = gpus.used()
            suspended = agent.done(agent.operation("Suspend", wire.SuspendRequest(name=container.id)).id)
            assert suspended.result.vram_bytes == used[0]
            assert gpus.used() == [0, 0]
            container.stands_still()
            found = eventually(lambda: _of(agent, container.id, wire.Container.SUSPENDED))
            assert found.vram_bytes == used[0]
            agent.done(agent.operation("Resume", wire.ResumeRequest(name=container.id)).id)
            container.computes_on()
    finally:
        gpu.heal(gpus)
        agent.stop()
        gpu.forget_helper()
        gpu.remove_driver()


def test_container_is_suspended_once_it_neither_calls_nor_computes(place: Path, ours: Ctr) -> None:
    settings = f'[self_socket]\nenabled = true\npath = "{place}/own/agent.sock"\n'
    wait = call("Self", "SuspendWhenIdle", idle={"seconds": 3})
    gpus = gpu.install_driver()
    try:
        with node_agent.running(place, settings) as agent, gpu.computing(ours) as container:
            pid = eventually(lambda: agent.call("Inventory", "GetContainer", _named(container.id)).pid)
            gpus.load((pid, 1, 50))
            with client(agent.own_address, wait, cgroups_of=pid) as program:
                assert program.next()["state"] == "PENDING"
            for microseconds in range(2, 52):
                gpus.load((pid, microseconds, 50))
                time.sleep(0.1)
            assert not _of(agent, container.id, wire.Container.SUSPENDED)
            eventually(lambda: _of(agent, container.id, wire.Container.SUSPENDED), seconds=60)
            assert gpus.used() == [0, 0]
            agent.done(agent.operation("Resume", wire.ResumeRequest(name=container.id)).id)
            container.computes_on()
    finally:
        gpu.heal(gpus)
        gpu.forget_helper()
        gpu.remove_driver()


def _named(id: str) -> wire.GetContainerRequest:
    return wire.GetContainerRequest(name=id)


def _of(agent: NodeAgent, id: str, state: wire.Container.GpuState) -> wire.Container | None:
    found: wire.Container = agent.call("Inventory", "GetContainer", wire.GetContainerRequest(name=id))
    return found if found.gpu == state else None


# ---- who may


def test_root_changes_readers_look_and_others_do_neither(readers: int, place: Path) -> None:
    look, change = call("Inventory", "ListContainers"), call("Operations", "Suspend", name="nothing")
    with node_agent.running(place) as agent:
        assert (place / "run/agent.sock").stat().st_mode & 0o777 == 0o660
        with client(agent.address, look, change, user=1000, group=1000, extra_groups=[readers]) as reader:
            assert "revision" in reader.next()
            assert reader.next()["code"] == "PERMISSION_DENIED"
        with client(agent.address, look, user=1000, group=1000, extra_groups=[]) as other:
            assert other.next()["code"] == "UNAVAILABLE"  # the file is closed to it
        (place / "run").chmod(0o755)
        (place / "run/agent.sock").chmod(0o666)
        with client(agent.address, look, change, user=1000, group=1000, extra_groups=[]) as other:
            assert other.next()["code"] == "PERMISSION_DENIED"
            assert other.next()["code"] == "PERMISSION_DENIED"
        with client(agent.address, change) as root:
            assert root.next()["code"] == "NOT_FOUND"
        assert [line["caller"]["uid"] for line in _audited("suspend")][-3:] == [1000, 1000, 0]


def _audited(verb: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in AUDIT.read_text().splitlines()]
    return [line for line in lines if line["verb"] == verb and line["caller"]["by"] == "agent"]  # type: ignore[index]


def test_names_of_certificates_decide_over_tcp(place: Path) -> None:
    ca, other = Authority(), Authority("another")
    ca.write(place, "localhost")
    settings = f"""[tls]
        listen = "127.0.0.1:7443"
        certificate = "{place}/certificate"
        key = "{place}/key"
        client_ca = "{place}/client_ca"
        operators = ["spiffe://site/ops"]
        readers = ["*.example"]
    """
    with node_agent.running(place, settings):
        operator, reader = ca.client("spiffe://site/ops"), ca.client("a.example")
        assert _over_tcp(operator, "ListContainers") is grpc.StatusCode.OK
        assert _over_tcp(operator, "Suspend") is grpc.StatusCode.NOT_FOUND
        assert _over_tcp(reader, "ListContainers") is grpc.StatusCode.OK
        assert _over_tcp(reader, "Suspend") is grpc.StatusCode.PERMISSION_DENIED
        assert _over_tcp(ca.client("elsewhere"), "ListContainers") is grpc.StatusCode.PERMISSION_DENIED
        assert _over_tcp(other.client("spiffe://site/ops", trusts=ca), "ListContainers") is grpc.StatusCode.UNAVAILABLE
        assert _audited("suspend")[-1]["caller"]["name"] == "a.example"  # type: ignore[index]


def _over_tcp(credentials: grpc.ChannelCredentials, method: str) -> grpc.StatusCode:
    requests = {"ListContainers": wire.ListContainersRequest(), "Suspend": wire.SuspendRequest(name="nothing")}
    with grpc.secure_channel("localhost:7443", credentials, (("grpc.use_local_subchannel_pool", 1),)) as channel:
        stub = services.InventoryStub(channel) if method == "ListContainers" else services.OperationsStub(channel)
        try:
            getattr(stub, method)(requests[method], timeout=10)
        except grpc.RpcError as error:
            return error.code()  # type: ignore[no-any-return, attr-defined]
        return grpc.StatusCode.OK


# ---- the process


def test_settings_are_read_again_and_bad_ones_are_not_used(agent: NodeAgent) -> None:
    assert agent.process is not None
    agent.write("connections = 17\n[operations]\nper_gpu = -1")
    agent.process.send_signal(signal.SIGHUP)
    eventually(lambda: agent.lines("settings.not_used"))
    findings = agent.call("Inventory", "GetNode", wire.GetNodeRequest()).findings
    assert [one.level for one in findings if one.check == "agent.toml"] == ["error"]
    agent.write('reader_group = "other"\n[operations]\nper_gpu = 3')
    agent.process.send_signal(signal.SIGHUP)
    eventually(lambda: agent.lines("settings.deferred"))
    (finding,) = (
        one for one in agent.call("Inventory", "GetNode", wire.GetNodeRequest()).findings if one.check == "agent.toml"
    )
    assert "reader_group" in finding.message


def test_manager_hears_of_the_start_of_life_and_of_the_end(place: Path) -> None:
    with node_agent.manager(place) as (heard, environment):
        agent = NodeAgent(place, environment=dict(environment))
        agent.start()
        try:
            assert any(b"READY=1" in one for one in iter(lambda: heard.recv(1000), None))
            assert agent.checked("liveness") == 1
            assert heard.recv(1000) == b"WATCHDOG=1"
            assert heard.recv(1000) == b"WATCHDOG=1"
            assert agent.stop() == 0
            messages = iter(lambda: heard.recv(1000), None)
            assert any(b"STOPPING=1" in one for one in messages)
        finally:
            agent.process.kill()  # type: ignore[union-attr]
            agent.process.wait(10)  # type: ignore[union-attr]
    assert not (place / "run/agent.sock").exists()


def test_second_agent_of_a_node_does_not_start(agent: NodeAgent) -> None:
    second = subprocess.run(
        ["kybernate", "agent", "--config", agent.place / "agent.toml"], capture_output=True, text=True, check=False
    )
    assert second.returncode == 1
    assert "another agent already uses" in second.stderr
    assert agent.checked() == 1


def test_agent_serves_the_socket_that_was_opened_before(place: Path) -> None:
    (place / "run").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "run/agent.sock"))
        listener.listen(8)
        os.set_inheritable(listener.fileno(), True)
        activate = f'exec 3<&{listener.fileno()}; export LISTEN_PID=$$ LISTEN_FDS=1; exec "$@"'
        with node_agent.running(place, argv=["bash", "-c", activate, "bash"], pass_fds=[listener.fileno()]) as agent:
            assert agent.call("Inventory", "GetNode", wire.GetNodeRequest()).name == "lab-node"
            assert agent.stop() == 0
        assert (place / "run/agent.sock").exists()


def test_agent_without_containerd_lives_and_is_not_ready(agent: NodeAgent, containerd: object) -> None:
    containerd.kill()  # type: ignore[attr-defined]
    eventually(lambda: agent.checked() == 2)
    assert agent.checked("liveness") == 1
    containerd.start()  # type: ignore[attr-defined]
    containerd.wait_ready()  # type: ignore[attr-defined]
    eventually(lambda: agent.checked() == 1)


def test_full_disk_of_the_journal_refuses_and_loses_nothing(place: Path, ours: Ctr) -> None:
    (place / "state").mkdir(mode=0o700)
    run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(place / "state")])
    try:
        with node_agent.running(place) as agent:
            _fill(place / "state/ballast")
            with counting(ours) as witness:
                assert eventually(lambda: _refused(agent, witness.id)) is grpc.StatusCode.UNAVAILABLE
                (place / "state/ballast").unlink()
                agent.ended(agent.operation("Suspend", wire.SuspendRequest(name=witness.id)).id)
            agent.stop()
    finally:
        run(["umount", "-l", str(place / "state")])
        shutil.rmtree(place / "state", ignore_errors=True)


def _fill(ballast: Path) -> None:
    """Take all that the disk has left."""
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)) == 4096:
                pass
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def _refused(agent: NodeAgent, container: str) -> grpc.StatusCode | None:
    """Ask for an operation, and return the code of the refusal; a full journal may have room for some."""
    try:
        agent.operation("Suspend", wire.SuspendRequest(name=container))
    except grpc.RpcError as error:
        return error.code()  # type: ignore[no-any-return, attr-defined]
    return None
