"""Probes by every means that kubelet has, as they succeed, fail and come late. The same under both handlers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.kubectl import Kubectl
from tests.cluster.pods import container, pod
from tests.system.ctr import eventually

SERVE = "touch /tmp/up; exec busybox httpd -f -p 8080 -h /tmp"
# etcd answers gRPC's health service; the node's own program is the only one here that does.
ETCD = "exec -a etcd /kubernetes --data-dir /tmp/etcd --listen-client-urls http://0.0.0.0:2379"
ETCD += " --advertise-client-urls http://127.0.0.1:2379 --listen-peer-urls http://127.0.0.1:2380"
PROGRAMS = {"name": "programs", "hostPath": {"path": "/usr/local/lib/kubernetes", "type": "File"}}
BY: dict[str, tuple[str, dict[str, Any]]] = {
    "exec": (SERVE, {"exec": {"command": ["test", "-e", "/tmp/up"]}}),
    "http": (SERVE, {"httpGet": {"path": "/up", "port": 8080}}),
    "tcp": (SERVE, {"tcpSocket": {"port": 8080}}),
    "grpc": (ETCD, {"grpc": {"port": 2379}}),
}
WRONG: dict[str, dict[str, Any]] = {
    "exec": {"exec": {"command": ["test", "-e", "/tmp/never"]}},
    "http": {"httpGet": {"path": "/never", "port": 8080}},
    "tcp": {"tcpSocket": {"port": 8081}},
    "grpc": {"grpc": {"port": 2379, "service": "never"}},
}
OFTEN = {"periodSeconds": 1, "timeoutSeconds": 5}


def restarts(kubectl: Kubectl, name: str, container: str) -> int:
    statuses = kubectl.get("pod", name)["status"].get("containerStatuses", ())
    return next((int(one["restartCount"]) for one in statuses if one["name"] == container), 0)


def test_probes_of_every_kind(kubectl: Kubectl, handler: str) -> None:
    """A container for each kind that succeeds, and one for each that is restarted because its liveness probe fails."""
    mounts = [{"name": "programs", "mountPath": "/kubernetes", "readOnly": True}]
    containers = []
    for kind, (script, probe) in BY.items():
        with_programs = {"volumeMounts": mounts} if kind == "grpc" else {}
        command = ["sh" if kind != "grpc" else "bash", "-c", script.replace("8080", f"80{len(containers)}0")]
        moved = {key: {**value, "port": int(f"80{len(containers)}0")} if value.get("port") == 8080 else value
                 for key, value in probe.items()}  # fmt: skip
        good = {name: {**moved, **OFTEN} for name in ("startupProbe", "readinessProbe", "livenessProbe")}
        good["startupProbe"]["failureThreshold"] = 60
        containers.append(
            container(kind, *command, of="busybox" if kind != "grpc" else "python", **good, **with_programs)
        )
    kubectl.apply(pod("good", handler=handler, containers=containers, volumes=[PROGRAMS]))
    kubectl.ready("pod/good", seconds=90)
    bad = [
        container(kind, "sleep", "1000", livenessProbe={**probe, **OFTEN, "failureThreshold": 1})
        for kind, probe in WRONG.items()
    ]
    kubectl.apply(pod("bad", handler=handler, containers=bad, restartPolicy="Always", terminationGracePeriodSeconds=1))
    for kind in WRONG:
        assert eventually(lambda kind=kind: restarts(kubectl, "bad", kind) > 0, seconds=60, pause=0.5), kind
    assert "Liveness probe failed" in kubectl.events()
    assert [restarts(kubectl, "good", kind) for kind in BY] == [0] * len(BY)


def test_readiness_that_ends_takes_the_pod_out_of_its_service(kubectl: Kubectl, handler: str) -> None:
    probe = {"readinessProbe": {"exec": {"command": ["test", "-e", "/tmp/ready"]}, **OFTEN, "failureThreshold": 1}}
    script = "touch /tmp/ready; sleep 1000"
    kubectl.apply(pod("in", handler=handler, containers=[container("main", "sh", "-c", script, **probe)]))
    kubectl("expose", "pod", "in", "--port=80", "--name=in")
    kubectl.ready("pod/in")

    def addresses() -> int:
        slices = kubectl.items("endpointslices", "-l", "kubernetes.io/service-name=in")
        return sum(bool(end["conditions"]["ready"]) for one in slices for end in one["endpoints"] or ())

    assert eventually(lambda: addresses() == 1, seconds=30)
    kubectl.exec("in", "rm", "/tmp/ready")
    kubectl.wait("condition=Ready=false", "pod/in")
    assert eventually(lambda: addresses() == 0, seconds=30)
    kubectl.exec("in", "touch", "/tmp/ready")
    kubectl.ready("pod/in")
    assert restarts(kubectl, "in", "main") == 0


@pytest.mark.parametrize("seconds", [1])
def test_exec_probe_that_hangs_is_a_failure_and_its_process_ends(kubectl: Kubectl, handler: str, seconds: int) -> None:
    probe = {"exec": {"command": ["sleep", "12345"]}, "timeoutSeconds": seconds, "periodSeconds": 1}
    kubectl.apply(pod("hangs", handler=handler, containers=[container("main", "sleep", "1000", readinessProbe=probe)]))
    kubectl.phase("hangs", "Running")
    assert eventually(lambda: "Readiness probe failed" in kubectl.events(), seconds=60, pause=0.5)
    assert eventually(lambda: kubectl.exec("hangs", "sh", "-c", "ps -o args").count("sleep 12345") <= 2, seconds=30)
