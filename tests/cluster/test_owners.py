"""Pods are moved as docs/kubernetes-owners.md has it for each kind of owner, and nothing is lost or counted twice."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.kubectl import Kubectl
from tests.cluster.pods import RESTRICTED, container, deployment, pod, pod_spec
from tests.documentation import block
from tests.lab.cluster.cluster import Cluster
from tests.system.ctr import eventually

PAGE = "docs/kubernetes-owners.md"
FROM = "kybernate.io/restore-from"
# Ends where a file is made that no image has: a restored container begins with the files of its image.
COUNTER = ("sh", "-c", "i=0; while [ ! -e /tmp/end ]; do i=$((i+1)); echo $i; sleep 0.2; done")
ENDS_AT = "i=0; while [ $i -lt %d ]; do i=$((i+1)); echo $i; sleep 0.2; done"


@pytest.fixture
def node(cluster: Cluster) -> Any:
    (only,) = cluster.nodes
    return only


def numbers(kubectl: Kubectl, name: str) -> list[int]:
    """Return what a counter has written, without a line that is not finished."""
    return [int(line) for line in kubectl.logs(name).split("\n")[:-1] if line.isdigit()]


def counted(kubectl: Kubectl, name: str, least: int) -> list[int]:
    def enough() -> list[int]:
        found = numbers(kubectl, name)
        assert found, f"{name} has counted nothing"
        assert found[-1] >= least, f"{name} has come to {found[-1]}"
        return found

    kubectl.ready(f"pod/{name}", seconds=90)
    return eventually(enough, seconds=60)


def names(kubectl: Kubectl, app: str) -> list[str]:
    """Return the pods of an application that are not being deleted."""
    items = kubectl.items("pods", "-l", f"app={app}")
    return sorted(one["metadata"]["name"] for one in items if "deletionTimestamp" not in one["metadata"])


def type_as_documented(
    recipe: list[str], kubectl: Kubectl, node: Any, put: Mapping[str, str], directory: Path = Path("/tmp")
) -> int:
    """Type the commands, with the names of this test `put` in their place; return the last number of the held one."""
    last = 0
    for line in recipe:
        for old, new in {"team-a": kubectl.namespace, **put}.items():
            line = line.replace(old, new)
        words = shlex.split(line)
        if words[0] == "kybernate":
            node.run(*words)
            held = words[2].split("/")[1]
            assert state(node, kubectl.namespace, held) == "held"
            last = numbers(kubectl, held)[-1]
            assert not kubectl.get("pod", held)["status"]["containerStatuses"][0]["restartCount"]
        else:
            assert words[:3] == ["kubectl", "--namespace", kubectl.namespace]
            files = [str(directory / word) if word.endswith(".yaml") else word for word in words[3:]]
            kubectl(*files)
    return last


def state(node: Any, namespace: str, name: str) -> str:
    (found,) = [
        one
        for one in json.loads(node.run("kybernate", "ps", "--json"))
        if (one["pod_namespace"], one["pod"]) == (namespace, name) and one["name"] and one["state"] != "stopped"
    ]
    return str(found["state"])


def test_bare_pod(kubectl: Kubectl, node: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"handler": "kybernate", "restartPolicy": "Always"}
    main = container("main", *COUNTER, **RESTRICTED)
    kubectl.apply(pod("counter", containers=[main], **options))
    counted(kubectl, "counter", 5)
    main["command"] = ["/never/run"]
    new = pod("counter-2", containers=[main], annotations={FROM: "moved"}, **options)
    (tmp_path / "counter-moved.yaml").write_text(json.dumps(new))
    recipe = block("docs/kubernetes-owners.md", "bare-pod").commands
    last = type_as_documented(recipe, kubectl, node, {}, tmp_path)
    assert counted(kubectl, "counter-2", last + 5)[0] == last + 1
    # A crash: from the only image of its lineage, and then from the one that it has written itself.
    kubectl.exec("counter-2", "touch", "/tmp/end")
    assert restarted(kubectl, "counter-2", 1)[0] == last + 1
    counted(kubectl, "counter-2", last + 20)
    node.run("kybernate", "checkpoint", f"{kubectl.namespace}/counter-2", "later")
    seen = numbers(kubectl, "counter-2")[-1]
    kubectl.exec("counter-2", "touch", "/tmp/end")
    assert last + 20 < restarted(kubectl, "counter-2", 2)[0] <= seen + 3


def restarted(kubectl: Kubectl, name: str, times: int) -> list[int]:
    """Wait until a pod's container runs after so many restarts, and return what it has counted since."""

    def runs() -> list[int]:
        (status,) = kubectl.get("pod", name)["status"]["containerStatuses"]
        assert (status["restartCount"], "running" in status["state"]) == (times, True), status
        found = numbers(kubectl, name)
        assert found
        return found

    return eventually(runs, seconds=120, pause=0.5)


def test_stateful_set(kubectl: Kubectl, node: Any) -> None:
    main = container("main", *COUNTER, **RESTRICTED)
    template = {"metadata": {"labels": {"app": "db"}, "annotations": {FROM: "latest"}},
                "spec": pod_spec(containers=[main], handler="kybernate")}  # fmt: skip
    spec = {"serviceName": "db", "replicas": 2, "selector": {"matchLabels": {"app": "db"}}, "template": template}
    kubectl.apply({"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "db"}, "spec": spec})
    kubectl.rolled_out("statefulset/db")
    for name in ("db-0", "db-1"):
        assert counted(kubectl, name, 5)[0] == 1  # there is no image yet
    recipe = block("docs/kubernetes-owners.md", "stateful-set").commands
    uid = kubectl.get("pod", "db-0")["metadata"]["uid"]
    last = type_as_documented(recipe, kubectl, node, {})
    eventually(lambda: kubectl.get("pod", "db-0")["metadata"]["uid"] != uid, seconds=60)
    assert counted(kubectl, "db-0", last + 5)[0] == last + 1
    kubectl.delete("pod/db-1")  # of which there is no image, though there is one of db-0
    assert counted(kubectl, "db-1", 3)[0] == 1


@pytest.mark.parametrize("strategy", ["RollingUpdate", "Recreate"])
def test_deployment(kubectl: Kubectl, node: Any, strategy: str) -> None:
    wanted = deployment("web", *COUNTER, handler="kybernate")
    wanted["spec"]["strategy"] = {"type": strategy}
    kubectl.apply(wanted)
    kubectl.rolled_out("deployment/web")
    (old,) = names(kubectl, "web")
    counted(kubectl, old, 5)
    recipe = block("docs/kubernetes-owners.md", "deployment").commands
    last = type_as_documented(recipe, kubectl, node, {"web-7d4b9c5f6d-x2x9p": old})
    (new,) = eventually(lambda: (found := names(kubectl, "web")) != [old] and len(found) == 1 and found, seconds=60)
    assert counted(kubectl, new, last + 5)[0] == last + 1
    assert not kubectl.get("pod", new)["status"]["containerStatuses"][0]["restartCount"]


def test_replicas_of_a_deployment_are_copies_of_the_image_that_the_template_names(kubectl: Kubectl, node: Any) -> None:
    kubectl.apply(deployment("web", *COUNTER, handler="kybernate", replicas=1))
    kubectl.rolled_out("deployment/web")
    (old,) = names(kubectl, "web")
    counted(kubectl, old, 5)
    recipe = block("docs/kubernetes-owners.md", "deployment").commands
    last = type_as_documented(recipe, kubectl, node, {"web-7d4b9c5f6d-x2x9p": old})
    kubectl("scale", "deployment/web", "--replicas=3")
    kubectl.rolled_out("deployment/web")
    for name in names(kubectl, "web"):
        assert counted(kubectl, name, last + 3)[0] == last + 1


def test_job(kubectl: Kubectl, node: Any) -> None:
    template = {"metadata": {"labels": {"app": "train"}},
                "spec": pod_spec("sh", "-c", ENDS_AT % 150, handler="kybernate", restartPolicy="Never")}  # fmt: skip
    spec = {"backoffLimit": 0, "template": template}
    kubectl.apply({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train"}, "spec": spec})
    (old,) = eventually(lambda: names(kubectl, "train"), seconds=60)
    counted(kubectl, old, 5)
    recipe = block("docs/kubernetes-owners.md", "job").commands
    last = type_as_documented(recipe, kubectl, node, {"train-x2x9p": old})
    (new,) = eventually(lambda: [name for name in names(kubectl, "train") if name != old], seconds=60)
    assert counted(kubectl, new, last + 3)[0] == last + 1
    kubectl.wait("condition=Complete", "job/train", seconds=120)
    status = kubectl.get("job", "train")["status"]
    assert (status.get("failed", 0), status["succeeded"]) == (0, 1)
    assert numbers(kubectl, new) == list(range(last + 1, 151))


def test_held_pod_is_released_and_continues(kubectl: Kubectl, node: Any) -> None:
    kubectl.apply(pod("counter", *COUNTER, handler="kybernate", restartPolicy="Always"))
    counted(kubectl, "counter", 5)
    node.run("kybernate", "checkpoint", f"{kubectl.namespace}/counter", "kept", "--hold")
    assert "cannot exec a held container" in kubectl.refused("exec", "counter", "--", "true")
    last = numbers(kubectl, "counter")[-1]
    node.run("kybernate", "release", f"{kubectl.namespace}/counter")
    found = counted(kubectl, "counter", last + 5)
    assert found == list(range(1, found[-1] + 1))
    assert not kubectl.get("pod", "counter")["status"]["containerStatuses"][0]["restartCount"]


def test_exec_probe_does_not_end_a_held_container(kubectl: Kubectl, node: Any) -> None:
    """The shim refuses its exec, and the kubelet does not know then whether the program lives."""
    probe = {"exec": {"command": ["true"]}, "periodSeconds": 1, "failureThreshold": 1}
    main = container("main", *COUNTER, livenessProbe=probe)
    kubectl.apply(pod("counter", handler="kybernate", containers=[main], restartPolicy="Always"))
    counted(kubectl, "counter", 5)
    for attempt in range(5):
        node.run("kybernate", "checkpoint", f"{kubectl.namespace}/counter", f"kept-{attempt}", "--hold")
        last = numbers(kubectl, "counter")[-1]
        with suppress(AssertionError):  # an exec that had begun is frozen with its container: kubelet asks nothing then
            eventually(lambda: "Liveness probe errored and resulted in unknown state" in kubectl.events(), seconds=15)
            break
        node.run("kybernate", "release", f"{kubectl.namespace}/counter")
    assert state(node, kubectl.namespace, "counter") == "held"
    node.run("kybernate", "release", f"{kubectl.namespace}/counter")
    counted(kubectl, "counter", last + 3)
    assert not kubectl.get("pod", "counter")["status"]["containerStatuses"][0]["restartCount"]


def test_path_to_an_image_is_refused_in_the_pods_events(kubectl: Kubectl, node: Any) -> None:
    path = f"/var/lib/kybernate/checkpoints/{kubectl.namespace}/kept"
    kubectl.apply(pod("counter", "/never/run", handler="kybernate", annotations={FROM: path}))
    eventually(lambda: "pods name images by their name" in kubectl("describe", "pod", "counter"), seconds=60)
