"""How containers of a pod begin, end, and begin again, with their limits. The same under both handlers."""

from __future__ import annotations

from typing import Any

from tests.cluster.kubectl import Kubectl
from tests.cluster.pods import container, pod
from tests.system.ctr import eventually

EATS = "import time; held = bytearray(256 << 20); held[::4096] = b'x' * (len(held) // 4096); time.sleep(1000)"
DATA: dict[str, Any] = {"volumes": [{"name": "data", "emptyDir": {}}]}
MOUNT: dict[str, Any] = {"volumeMounts": [{"name": "data", "mountPath": "/data"}]}


def statuses(kubectl: Kubectl, name: str, kind: str = "containerStatuses") -> dict[str, Any]:
    return {one["name"]: one for one in kubectl.get("pod", name)["status"].get(kind, ())}


def test_restart_policies(kubectl: Kubectl, handler: str) -> None:
    def named(policy: str, status: int) -> dict[str, Any]:
        name = f"{policy.lower()}-{status}"
        return pod(name, "sh", "-c", f"exit {status}", handler=handler, restartPolicy=policy)

    kubectl.apply(*(named(policy, status) for policy in ("Always", "OnFailure", "Never") for status in (0, 1)))
    for name in ("always-0", "always-1", "onfailure-1"):
        assert eventually(lambda name=name: statuses(kubectl, name)["main"]["restartCount"] >= 1, seconds=60), name
    kubectl.phase("onfailure-0", "Succeeded")
    kubectl.phase("never-0", "Succeeded")
    kubectl.phase("never-1", "Failed")
    waiting = lambda: statuses(kubectl, "always-1")["main"]["state"].get("waiting", {}).get("reason")  # noqa: E731
    assert eventually(lambda: waiting() == "CrashLoopBackOff", seconds=60)
    ended = [statuses(kubectl, name)["main"] for name in ("onfailure-0", "never-0", "never-1")]
    assert [one["restartCount"] for one in ended] == [0, 0, 0]
    assert [one["state"]["terminated"]["exitCode"] for one in ended] == [0, 0, 1]


def test_init_containers_then_sidecar_then_program(kubectl: Kubectl, handler: str) -> None:
    ready = {"startupProbe": {"exec": {"command": ["grep", "-q", "sidecar", "/data/log"]}, "periodSeconds": 1}}
    inits = [
        container("first", "sh", "-c", "echo first >>/data/log", **MOUNT),
        container("second", "sh", "-c", "echo second >>/data/log", **MOUNT),
        container(
            "sidecar", "sh", "-c", "trap 'echo sidecar ends >>/data/log; exit' TERM; echo sidecar >>/data/log;"
            " while :; do sleep 0.1; done", restartPolicy="Always", **ready, **MOUNT,
        ),
    ]  # fmt: skip
    main = container("main", "sh", "-c", "echo main >>/data/log; cat /data/log; sleep 1", **MOUNT)
    kubectl.apply(pod("order", handler=handler, initContainers=inits, containers=[main], **DATA))
    kubectl.phase("order", "Succeeded")
    assert kubectl.logs("order", "--container=main").split() == ["first", "second", "sidecar", "main"]
    assert statuses(kubectl, "order", "initContainerStatuses")["sidecar"]["state"]["terminated"]["exitCode"] == 0


def test_init_container_that_fails_is_repeated_before_the_program(kubectl: Kubectl, handler: str) -> None:
    init = container("init", "sh", "-c", "test -e /data/once || { touch /data/once; exit 1; }", **MOUNT)
    main = container("main", "true")
    kubectl.apply(
        pod("again", handler=handler, initContainers=[init], containers=[main], restartPolicy="OnFailure", **DATA)
    )
    kubectl.phase("again", "Succeeded")
    assert statuses(kubectl, "again", "initContainerStatuses")["init"]["restartCount"] == 1


def test_hooks_and_the_grace_period(kubectl: Kubectl, handler: str) -> None:
    hooks = {
        "lifecycle": {
            "postStart": {"exec": {"command": ["sh", "-c", "echo started >>/proc/1/fd/1"]}},
            "preStop": {"exec": {"command": ["sh", "-c", "echo stopping >>/proc/1/fd/1; sleep 1"]}},
        }
    }
    polite = "trap 'echo asked; exit 0' TERM; while :; do sleep 0.1; done"
    kubectl.apply(pod("polite", handler=handler, containers=[container("main", "sh", "-c", polite, **hooks)]))
    kubectl.apply(pod("deaf", "sh", "-c", "trap '' TERM; while :; do sleep 0.1; done", handler=handler))
    kubectl.ready("pod/polite", "pod/deaf")
    assert eventually(lambda: "started" in kubectl.logs("polite"))
    with kubectl.start("logs", "--follow", "polite") as following:
        kubectl("delete", "pod", "polite", "--grace-period=30")
        said, _ = following.communicate(timeout=60)
    assert said.split() == ["started", "stopping", "asked"]
    kubectl("delete", "pod", "deaf", "--grace-period=2")
    assert not kubectl.items("pods")


def test_out_of_memory_is_said_and_restarts(kubectl: Kubectl, handler: str) -> None:
    limits = {"resources": {"limits": {"memory": "64Mi", "cpu": "500m"}}}
    eater = container("main", "python3", "-c", EATS, of="python", **limits)
    kubectl.apply(pod("oom", handler=handler, containers=[eater], restartPolicy="OnFailure"))
    assert eventually(lambda: statuses(kubectl, "oom")["main"]["restartCount"] >= 1, seconds=90)
    last = statuses(kubectl, "oom")["main"]["lastState"]["terminated"]
    assert (last["reason"], last["exitCode"]) == ("OOMKilled", 137)


def test_resources_and_resize_in_place(kubectl: Kubectl, handler: str) -> None:
    both = {"resources": {"requests": {"cpu": "50m", "memory": "32Mi"}, "limits": {"cpu": "100m", "memory": "64Mi"}}}
    kubectl.apply(pod("sized", handler=handler, containers=[container("main", **both)]))
    kubectl.ready("pod/sized")
    read = "cd /sys/fs/cgroup; cat cpu/cpu.cfs_quota_us memory/memory.limit_in_bytes cpu/cpu.shares"
    assert kubectl.exec("sized", "sh", "-c", read).split() == ["10000", str(64 << 20), "51"]
    more = '{"spec":{"containers":[{"name":"main","resources":{"requests":{"cpu":"100m","memory":"48Mi"},'
    more += '"limits":{"cpu":"200m","memory":"96Mi"}}}]}}'
    kubectl("patch", "pod", "sized", "--subresource=resize", "--patch", more)
    assert eventually(
        lambda: kubectl.exec("sized", "sh", "-c", read).split() == ["20000", str(96 << 20), "102"], seconds=60
    )
    assert statuses(kubectl, "sized")["main"]["restartCount"] == 0
    actual = lambda: statuses(kubectl, "sized")["main"]["resources"]["limits"]["memory"]  # noqa: E731
    assert eventually(lambda: actual() == "96Mi", seconds=60)


def test_program_that_is_not_there_is_the_reason_that_the_pod_shows(kubectl: Kubectl, handler: str) -> None:
    kubectl.apply(pod("missing", "/no/such/program", handler=handler))
    kubectl.phase("missing", "Failed")
    state = statuses(kubectl, "missing")["main"]["state"]["terminated"]
    assert state["reason"] == "StartError"
    assert "/no/such/program" in state["message"]
    assert state["exitCode"] == 128


def test_image_that_is_not_there_is_the_reason_that_the_pod_shows(kubectl: Kubectl, handler: str) -> None:
    absent = {**container("main"), "image": "localhost:5000/absent:latest"}
    kubectl.apply(pod("absent", handler=handler, containers=[absent]))
    reason = lambda: statuses(kubectl, "absent").get("main", {}).get("state", {}).get("waiting", {}).get("reason")  # noqa: E731
    assert eventually(lambda: reason() in ("ErrImagePull", "ImagePullBackOff"), seconds=60)


def test_active_deadline_ends_the_pod(kubectl: Kubectl, handler: str) -> None:
    kubectl.apply(pod("late", handler=handler, activeDeadlineSeconds=2))
    kubectl.phase("late", "Failed")
    assert kubectl.get("pod", "late")["status"]["reason"] == "DeadlineExceeded"
