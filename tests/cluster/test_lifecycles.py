"""How containers of a pod begin, end, and begin again, with their limits. The same under both handlers."""

from __future__ import annotations

import json
import re
import time
from typing import Any

from tests.cluster.conftest import OURS, STOCK
from tests.cluster.kubectl import Kubectl, last
from tests.cluster.pod_events import events_of
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


def test_container_that_fails_is_restarted_ever_later(kubectl: Kubectl) -> None:
    """Side by side by both handlers, as kubelet says for how long it waits with each restart."""
    handlers = (OURS, STOCK)
    kubectl.apply(*(pod(name, "false", handler=name, restartPolicy="Always") for name in handlers))
    found: dict[str, list[int]] = {name: [] for name in handlers}

    def twice() -> bool:
        kubectl("annotate", "pods", "--all", "--overwrite", f"look={time.monotonic()}")  # kubelet writes it at a sync
        for name, said in found.items():
            waiting = statuses(kubectl, name).get("main", {}).get("state", {}).get("waiting", {})
            wait = re.match(r"back-off (\d+)s restarting failed container=main", waiting.get("message", ""))
            if wait and int(wait[1]) not in said:
                said.append(int(wait[1]))
        assert all(len(said) == 2 for said in found.values()), found
        return True

    assert eventually(twice, seconds=120, pause=1)
    assert found[OURS] == found[STOCK] == sorted(found[OURS])
    for name in handlers:
        (said,) = [one for one in events_of(kubectl, name, source="kubelet") if one.reason == "BackOff"]
        assert said.count >= 2
        assert statuses(kubectl, name)["main"]["restartCount"] == 2


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


def test_sidecar_that_dies_is_restarted_while_the_program_runs_on(kubectl: Kubectl, handler: str) -> None:
    waits = "while test ! -e /data/end; do sleep 0.1; done; rm /data/end; exit 7"
    sidecar = container("sidecar", "sh", "-c", waits, restartPolicy="Always", **MOUNT)
    main = container("main", "sh", "-c", "i=0; while :; do i=$((i+1)); echo $i; sleep 0.2; done", **MOUNT)
    kubectl.apply(pod("beside", handler=handler, initContainers=[sidecar], containers=[main], **DATA))
    kubectl.ready("pod/beside")
    before = statuses(kubectl, "beside")["main"]["containerID"]
    first = statuses(kubectl, "beside", "initContainerStatuses")["sidecar"]["containerID"]
    kubectl.exec("beside", "touch", "/data/end", container="main")

    def restarted() -> bool:
        found = statuses(kubectl, "beside", "initContainerStatuses")["sidecar"]
        assert (found["restartCount"], found["ready"], "running" in found["state"]) == (1, True, True), found
        assert found["lastState"]["terminated"]["exitCode"] == 7
        return bool(found["containerID"] != first)

    assert eventually(restarted, seconds=60)
    counted = last(kubectl, "beside")
    assert eventually(lambda: last(kubectl, "beside") > counted)
    assert kubectl.logs("beside", "--container=main").split("\n")[0] == "1"
    after = statuses(kubectl, "beside")["main"]
    assert (after["containerID"], after["restartCount"]) == (before, 0)


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
    ended = statuses(kubectl, "oom")["main"]["lastState"]["terminated"]
    assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137)


# The CPU's quota of each 100 ms, in µs, the limit of memory in bytes, the share of the CPU; on cgroup v2, or else v1.
READ = """
cd /sys/fs/cgroup
if test -e cgroup.controllers; then cut -d' ' -f1 cpu.max; cat memory.max cpu.weight
else cat cpu/cpu.cfs_quota_us memory/memory.limit_in_bytes cpu/cpu.shares; fi
"""


def limits(kubectl: Kubectl, name: str) -> tuple[int, int, int]:
    """Return the CPU's quota in millicores, the limit of memory in MiB, and the share of the CPU, in a container."""
    quota, memory, share = map(int, kubectl.exec(name, "sh", "-c", READ).split())
    return quota // 100, memory >> 20, share


def sized(cpu: int, memory: int) -> dict[str, Any]:
    """Return resources: limits of so many millicores and MiB, and requests of half as much."""
    return {
        "requests": {"cpu": f"{cpu // 2}m", "memory": f"{memory // 2}Mi"},
        "limits": {"cpu": f"{cpu}m", "memory": f"{memory}Mi"},
    }


def resize(kubectl: Kubectl, name: str, cpu: int, memory: int) -> None:
    """Resize a running container, and wait until kubelet shows the new limits as the actual ones."""
    spec = {"containers": [{"name": "main", "resources": sized(cpu, memory)}]}
    kubectl("patch", "pod", name, "--subresource=resize", "--patch", json.dumps({"spec": spec}))

    def shown() -> bool:
        found = statuses(kubectl, name)["main"]
        assert found["resources"] == sized(cpu, memory), found
        assert limits(kubectl, name)[:2] == (cpu, memory)
        return True

    assert eventually(shown, seconds=60)


def test_resources_and_resize_in_place(kubectl: Kubectl, handler: str) -> None:
    """Up, and down again: the container is the same one, and has all that it was given at first."""
    kubectl.apply(pod("sized", handler=handler, containers=[container("main", resources=sized(100, 64))]))
    kubectl.ready("pod/sized")
    before = statuses(kubectl, "sized")["main"]["containerID"]
    begun = limits(kubectl, "sized")
    assert begun[:2] == (100, 64)
    resize(kubectl, "sized", 200, 96)
    assert limits(kubectl, "sized")[2] > begun[2]
    resize(kubectl, "sized", 100, 64)
    assert limits(kubectl, "sized") == begun
    after = statuses(kubectl, "sized")["main"]
    assert (after["containerID"], after["restartCount"]) == (before, 0)


def test_resize_restarts_the_container_that_wants_it(kubectl: Kubectl, handler: str) -> None:
    """For its memory, and not for its CPU."""
    policy = {"resizePolicy": [{"resourceName": "memory", "restartPolicy": "RestartContainer"}]}
    main = container("main", resources=sized(100, 64), **policy)
    kubectl.apply(pod("sized", handler=handler, containers=[main], restartPolicy="Always"))
    kubectl.ready("pod/sized")
    resize(kubectl, "sized", 200, 64)
    assert statuses(kubectl, "sized")["main"]["restartCount"] == 0
    before = statuses(kubectl, "sized")["main"]["containerID"]
    resize(kubectl, "sized", 200, 96)
    after = statuses(kubectl, "sized")["main"]
    assert after["restartCount"] == 1
    assert after["containerID"] != before
    kubectl.ready("pod/sized")


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
