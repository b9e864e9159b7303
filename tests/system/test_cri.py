"""Pods through CRI, as the kubelet drives containerd, under both spellings of our runtime and under the stock one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from kybernate.messages import cri_runtime_pb2 as wire
from tests.system.cri import Cri
from tests.system.ctr import Ctr, eventually
from tests.system.leftovers import Snapshot


@pytest.fixture(params=["kybernate", "kybernate-path", "runc"])
def cri(request: pytest.FixtureRequest) -> Iterator[Cri]:
    client = Cri(handler=request.param)
    yield client
    client.close()


@pytest.fixture
def ours() -> Iterator[Cri]:
    with Cri() as client:
        yield client


COUNT = ["sh", "-c", "i=0; while :; do i=$((i+1)); echo $i; sleep 0.1; done"]


def test_containers_of_a_pod_share_one_daemon(cri: Cri) -> None:
    before = Snapshot.take().shims
    with cri.pod() as pod:
        first = cri.run(pod, "first", ["sleep", "1000"])
        second = cri.run(pod, "second", ["sleep", "1000"])
        assert len(Snapshot.take().shims - before) == 1
        assert cri.state(first) == cri.state(second) == "CONTAINER_RUNNING"


def test_pod_has_its_own_address_and_hostname(cri: Cri) -> None:
    with cri.pod(hostname="wanted") as pod:
        id = cri.run(pod, "c", ["sleep", "1000"])
        address = cri.pod_ip(pod)
        assert address
        assert address in cri.exec(id, "ip", "addr")[1]
        assert cri.exec(id, "hostname") == (0, "wanted\n")


def test_pods_on_one_bridge_reach_each_other(ours: Cri) -> None:
    with ours.pod() as server, ours.pod() as client:
        ours.run(server, "s", ["sh", "-c", "while :; do echo hello | nc -l -p 7000; done"])
        id = ours.run(client, "c", ["sleep", "1000"])
        address = ours.pod_ip(server)
        eventually(lambda: ours.exec(id, "sh", "-c", f"nc {address} 7000 </dev/null") == (0, "hello\n"))


def test_host_network_pod_has_the_nodes_interfaces(cri: Cri) -> None:
    with cri.pod(host_network=True) as pod:
        id = cri.run(pod, "c", ["sleep", "1000"])
        node = sorted(path.name for path in Path("/sys/class/net").iterdir())
        status, interfaces = cri.exec(id, "ls", "/sys/class/net")
        assert status == 0
        assert interfaces.split() == node


def test_log_is_written_and_follows_a_rotation(cri: Cri) -> None:
    with cri.pod() as pod:
        id = cri.run(pod, "c", COUNT)
        cri.await_log(pod, "c", "3")
        path = pod.logs / "c.0.log"
        path.rename(path.with_suffix(".old"))
        cri.call("ReopenContainerLog", wire.ReopenContainerLogRequest(container_id=id))
        eventually(lambda: path.exists() and path.read_text())
        old = int(path.with_suffix(".old").read_text().split()[-1])
        new = int(path.read_text().split()[3])
        assert new == old + 1


def test_exec_sync_gives_output_and_code_and_keeps_its_deadline(cri: Cri) -> None:
    with cri.pod() as pod:
        id = cri.run(pod, "c", ["sleep", "1000"])
        assert cri.exec(id, "sh", "-c", "echo out; exit 7") == (7, "out\n")
        with pytest.raises(grpc.RpcError, match=r"(?i)deadline|timeout"):
            cri.exec(id, "sleep", "1000", seconds=1)
        assert cri.exec(id, "echo", "alive") == (0, "alive\n")


def test_exit_is_reported_with_its_code_and_reason(cri: Cri) -> None:
    with cri.pod() as pod:
        good = cri.run(pod, "good", ["true"])
        bad = cri.run(pod, "bad", ["sh", "-c", "exit 5"])
        eventually(lambda: cri.state(good) == cri.state(bad) == "CONTAINER_EXITED")
        assert (cri.status(good).exit_code, cri.status(good).reason) == (0, "Completed")
        assert (cri.status(bad).exit_code, cri.status(bad).reason) == (5, "Error")


def test_out_of_memory_is_the_reason_of_the_exit(cri: Cri) -> None:
    with cri.pod() as pod:
        id = cri.run(pod, "hog", ["sh", "-c", "x=x; while :; do x=$x$x; done"], memory=16 << 20)
        eventually(lambda: cri.state(id) == "CONTAINER_EXITED", seconds=40)
        eventually(lambda: cri.status(id).reason == "OOMKilled")


def test_container_of_a_pod_is_restarted(cri: Cri) -> None:
    with cri.pod() as pod:
        keeper = cri.run(pod, "keeper", ["sleep", "1000"])
        for attempt in range(3):
            id = cri.run(pod, "c", ["sh", "-c", f"echo attempt {attempt}; sleep 1000"], attempt=attempt)
            cri.await_log(pod, "c", f"attempt {attempt}", attempt=attempt)
            cri.stop(id)
            eventually(lambda id=id: cri.state(id) == "CONTAINER_EXITED")
            cri.remove(id)
        assert cri.state(keeper) == "CONTAINER_RUNNING"


def test_stop_gives_the_container_its_grace(cri: Cri) -> None:
    with cri.pod() as pod:
        id = cri.run(pod, "c", ["sh", "-c", "trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.1; done"])
        cri.await_log(pod, "c", "up")
        cri.stop(id, grace=20)
        cri.await_log(pod, "c", "bye")
        assert cri.status(id).exit_code == 0


def test_stats_are_those_of_the_container(cri: Cri) -> None:
    with cri.pod() as pod:
        id = cri.run(pod, "c", ["sh", "-c", "while :; do :; done"])

        def busy() -> bool:
            stats = cri.stats(id)
            return stats.cpu.usage_core_nano_seconds.value > 10_000_000 and stats.memory.working_set_bytes.value > 0

        eventually(busy)


def test_limits_can_be_changed(cri: Cri) -> None:
    with cri.pod() as pod:
        id = cri.run(pod, "c", ["sleep", "1000"], memory=64 << 20)
        request = wire.UpdateContainerResourcesRequest(container_id=id)
        request.linux.memory_limit_in_bytes = 128 << 20
        cri.call("UpdateContainerResources", request)
        assert str(128 << 20) in str(Ctr(namespace="k8s.io").metrics(id))


def test_attach_reaches_stdin_and_stdout(cri: Cri) -> None:
    with cri.pod() as pod:
        id = cri.run(pod, "c", ["sh", "-c", 'while read line; do echo "got $line"; done'], stdin=True)
        stream = cri.attach(id, stdin=True)
        stream.send_binary(b"\x00one\n")
        frames = b""
        while b"got one" not in frames:
            frame = stream.recv()
            frames += frame[1:] if frame[:1] == b"\x01" else b""
        stream.close()
        cri.await_log(pod, "c", "got one")
        assert cri.state(id) == "CONTAINER_RUNNING"


def test_failed_container_does_not_disturb_its_pod(cri: Cri) -> None:
    with cri.pod() as pod:
        keeper = cri.run(pod, "keeper", COUNT)
        id = cri.create(pod, "bad", ["/no/such/command"])
        with pytest.raises(grpc.RpcError, match=r"no such file|not found"):
            cri.start(id)
        assert cri.state(id) == "CONTAINER_EXITED"
        count = len(cri.log(pod, "keeper"))
        eventually(lambda: len(cri.log(pod, "keeper")) > count)
        assert cri.state(keeper) == "CONTAINER_RUNNING"


def test_twenty_pods_come_and_go_side_by_side(ours: Cri) -> None:
    def life(number: int) -> list[str]:
        with ours.pod() as pod:
            ours.run(pod, "c", ["sh", "-c", f"echo {number}; sleep 1000"])
            return ours.await_log(pod, "c", str(number), seconds=60)

    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(life, range(20))) == [[str(number)] for number in range(20)]
