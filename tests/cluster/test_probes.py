"""Probes by every means that kubelet has, as they succeed, fail and come late. The same under both handlers."""

from __future__ import annotations

import re
from typing import Any

from tests.cluster.kubectl import Kubectl
from tests.cluster.pod_events import events_of
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
WRONG_ANSWER = {"exec": "", "http": "statuscode: 404", "tcp": "connection refused", "grpc": "code = NotFound"}
OFTEN = {"periodSeconds": 1, "timeoutSeconds": 5}
ENOUGH = 5  # probes, of each of which a process could be left


def restarts(kubectl: Kubectl, name: str, container: str) -> int:
    statuses = kubectl.get("pod", name)["status"].get("containerStatuses", ())
    return next((int(one["restartCount"]) for one in statuses if one["name"] == container), 0)


def test_probes_of_every_kind(kubectl: Kubectl, handler: str) -> None:
    """A container for each kind that succeeds, and one for each that is restarted because its liveness probe fails."""
    good = [
        serving(kind, **{name: {**moved(probe, kind), **OFTEN} for name in ("readinessProbe", "livenessProbe")},
                startupProbe={**moved(probe, kind), **OFTEN, "failureThreshold": 60})
        for kind, (_, probe) in BY.items()
    ]  # fmt: skip
    kubectl.apply(pod("good", handler=handler, containers=good, volumes=[PROGRAMS]))
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


def moved(probe: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the probe with its container's own port, for the containers of a pod share its addresses."""
    port = 8000 + 10 * list(BY).index(kind)
    return {
        key: {**value, "port": port + value["port"] - 8080} if value.get("port") in (8080, 8081) else value
        for key, value in probe.items()
    }


def serving(kind: str, **probes: Any) -> dict[str, Any]:
    """Return a container that serves what the right probe of a kind asks for, at a port of its own."""
    script = BY[kind][0].replace("8080", str(8000 + 10 * list(BY).index(kind)))
    if kind != "grpc":
        return container(kind, "sh", "-c", script, **probes)
    mounts = [{"name": "programs", "mountPath": "/kubernetes", "readOnly": True}]
    return container(kind, "bash", "-c", script, of="python", volumeMounts=mounts, **probes)


def test_startup_probe_that_fails_restarts_and_readiness_that_fails_does_not(kubectl: Kubectl, handler: str) -> None:
    """By every kind, where the program runs and answers what the probe does not want to hear."""
    late = [
        serving(kind, startupProbe={**moved(WRONG[kind], kind), **OFTEN, "failureThreshold": 3})
        for kind in ("exec", "http")
    ]
    unready = [
        serving(kind, startupProbe={**moved(BY[kind][1], kind), **OFTEN, "failureThreshold": 60},
                readinessProbe={**moved(probe, kind), **OFTEN, "failureThreshold": 1})
        for kind, probe in WRONG.items()
    ]  # fmt: skip
    options: dict[str, Any] = {"handler": handler, "volumes": [PROGRAMS], "terminationGracePeriodSeconds": 1}
    kubectl.apply(
        pod("late", containers=late, restartPolicy="Always", **options),
        pod("unready", containers=unready, restartPolicy="Always", **options),
    )
    for kind in ("exec", "http"):
        said = f"Startup probe failed: .*{WRONG_ANSWER[kind]}"
        eventually(lambda kind=kind, said=said: refusals(kubectl, "late", kind, said), seconds=90, pause=0.5)
        eventually(lambda kind=kind: restarts(kubectl, "late", kind) > 0, seconds=90, pause=0.5)
        assert refusals(kubectl, "late", kind, "failed startup probe, will be restarted"), kind
    for kind, answer in WRONG_ANSWER.items():
        said = f"Readiness probe failed: .*{answer}"
        eventually(lambda kind=kind, said=said: refusals(kubectl, "unready", kind, said), seconds=90, pause=0.5)
    status = kubectl.get("pod", "unready")["status"]["containerStatuses"]
    found = {one["name"]: (one["started"], one["ready"], one["restartCount"]) for one in status}
    assert found == dict.fromkeys(BY, (True, False, 0))


def refusals(kubectl: Kubectl, name: str, container: str, pattern: str) -> int:
    """Return how many times kubelet has said so of a container, by the counts of its events."""
    found = events_of(kubectl, name, source="kubelet")
    return sum(one.count for one in found if container in one.field and re.search(pattern, one.message, re.DOTALL))


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


def test_exec_probe_that_hangs_is_a_failure_and_its_process_ends(kubectl: Kubectl, handler: str) -> None:
    probe = {"exec": {"command": ["sleep", "12345"]}, "timeoutSeconds": 1, "periodSeconds": 1}
    kubectl.apply(pod("hangs", handler=handler, containers=[container("main", "sleep", "1000", readinessProbe=probe)]))
    kubectl.phase("hangs", "Running")
    failed = lambda: refusals(kubectl, "hangs", "main", "Readiness probe failed")  # noqa: E731
    assert eventually(lambda: failed() >= ENOUGH, seconds=90, pause=0.5)
    processes = kubectl.exec("hangs", "ps", "-o", "args").splitlines().count("sleep 12345")
    assert processes <= 2, f"after {failed()} probes"  # that of the probe that runs, and that of the one before
