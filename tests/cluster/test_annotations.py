"""A checkpoint by `kubectl annotate`, and annotations that are wrong or have no effect."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.cluster.in_cluster import access
from tests.cluster.kubectl import Kubectl, last
from tests.cluster.pod_events import events_of, wait_for
from tests.cluster.pods import RESTRICTED, container, pod
from tests.lab.cluster.cluster import Cluster
from tests.lab.cluster.nodes import Node
from tests.system.ctr import eventually

COUNTER = ("sh", "-c", "i=0; while :; do i=$((i+1)); echo $i; sleep 0.2; done")
CHECKPOINT, FROM = "kybernate.io/checkpoint", "kybernate.io/restore-from"


@pytest.fixture(scope="module")
def node(cluster: Cluster, administrator: Kubectl) -> Iterator[Node]:
    """The node, whose agent has access to the API server."""
    (found,) = cluster.nodes
    with access(administrator, found):
        yield found


def operations(node: Node, namespace: str) -> list[str]:
    """Return the states of the operations that annotations of the namespace's pods have asked for."""
    found = json.loads(node.run("kybernate", "ops", "-o", "json"))
    return [str(one["state"]) for one in found if f"annotation of pod {namespace}/" in str(one)]


def wait_for_images(kubectl: Kubectl, number: int) -> list[str]:
    """Return what the pod's events say of images that were written, the oldest first, once there are so many."""
    found: list[str] = []

    def there() -> bool:
        events = events_of(kubectl, "counter")
        found[:] = [one.message for one in events if one.reason == "Checkpointed"]
        assert len(found) == number, f"not {number} images in {events}"
        return True

    eventually(there, seconds=60)
    return found


def test_user_asks_by_an_annotation_once_and_restores_it(kubectl: Kubectl, user: Kubectl, node: Node) -> None:
    main = container("main", *COUNTER, **RESTRICTED)
    user.apply(pod("counter", handler="kybernate", containers=[main]))
    assert eventually(lambda: last(user, "counter") > 3)
    user("annotate", "pod", "counter", f"{CHECKPOINT}=by-user")
    assert "Wrote image by-user" in wait_for(user, "counter", "Checkpointed").message
    node.agent.restart()
    user("annotate", "pod", "counter", f"{CHECKPOINT}-")
    user("annotate", "pod", "counter", f"{CHECKPOINT}=by-user")
    user("annotate", "pod", "counter", "example.org/seen=yes")
    user("annotate", "pod", "counter", f"{CHECKPOINT}=again", "--overwrite")
    assert eventually(lambda: len([one for one in events_of(user, "counter") if one.reason == "Checkpointed"]) == 2)
    assert len(operations(node, kubectl.namespace)) == 2
    before = last(user, "counter")
    assert eventually(lambda: last(user, "counter") > before)  # it has continued
    assert user.get("pod", "counter")["status"]["containerStatuses"][0]["restartCount"] == 0
    user.delete("pod/counter")
    main["command"] = ["/never/run"]
    user.apply(pod("second", handler="kybernate", containers=[main], annotations={FROM: "by-user"}))
    user.ready("pod/second")
    audited = node.run("sh", "-c", f"grep {kubectl.namespace} /var/log/kybernate/audit.jsonl")
    lines = [json.loads(line) for line in audited.splitlines()]
    by_annotation = [line for line in lines if line["reason"].startswith("annotation kybernate.io/checkpoint")]
    assert [(line["verb"], line["decision"]) for line in by_annotation] == [("checkpoint", "allowed")] * 2


def test_restart_of_the_agent_forgets_nothing(kubectl: Kubectl, node: Node) -> None:
    """It is killed as soon as a request may have arrived, and asked while it is away."""
    kubectl.apply(pod("counter", *COUNTER, handler="kybernate"))
    assert eventually(lambda: last(kubectl, "counter") > 1)
    kubectl("annotate", "pod", "counter", f"{CHECKPOINT}=killed")
    node.agent.restart()
    wait_for(kubectl, "counter", "Checkpointed")
    node.agent.kill()
    kubectl("annotate", "pod", "counter", f"{CHECKPOINT}=away", "--overwrite")
    node.agent.start()
    node.agent.wait_ready()
    assert "image away" in wait_for_images(kubectl, 2)[1]
    assert len(operations(node, kubectl.namespace)) == 2


def test_image_that_is_written_while_the_agent_is_away_is_one_event_of_the_pod(kubectl: Kubectl, node: Node) -> None:
    kubectl.apply(pod("counter", *COUNTER, handler="kybernate"))
    assert eventually(lambda: last(kubectl, "counter") > 1)
    for number, name in enumerate(("first", "second"), start=1):
        image = node.path(f"/var/lib/kybernate/checkpoints/{kubectl.namespace}/{name}")
        kubectl("annotate", "pod", "counter", f"{CHECKPOINT}={name}", "--overwrite")
        eventually(image.exists, pause=0.005)
        node.agent.kill()  # the shim writes the image
        eventually((image / "kybernate-manifest.json").exists)
        node.agent.start()
        node.agent.wait_ready()
        assert f"Wrote image {name}" in wait_for_images(kubectl, number)[-1]
    node.agent.restart()
    kubectl("annotate", "pod", "counter", f"{CHECKPOINT}=last", "--overwrite")
    assert "Wrote image last" in wait_for_images(kubectl, 3)[2]


def test_container_of_several_is_named(kubectl: Kubectl, node: Node) -> None:
    kubectl.apply(
        pod("two", handler="kybernate", containers=[container("one", *COUNTER), container("other", *COUNTER)])
    )
    kubectl.ready("pod/two")
    kubectl("annotate", "pod", "two", f"{CHECKPOINT}=which")
    assert f"Use one of {CHECKPOINT}.one, {CHECKPOINT}.other" in wait_for(kubectl, "two", "CheckpointRefused").message
    kubectl("annotate", "pod", "two", f"{CHECKPOINT}-", f"{CHECKPOINT}.other=named")
    assert wait_for(kubectl, "two", "Checkpointed").field == "spec.containers{other}"


def test_what_cannot_be_is_said_with_its_remedy(kubectl: Kubectl, node: Node) -> None:
    kubectl.apply(pod("counter", *COUNTER, handler="kybernate"))
    assert eventually(lambda: last(kubectl, "counter") > 1)
    node.run("kybernate", "checkpoint", f"{kubectl.namespace}/counter", "taken")
    kubectl("annotate", "pod", "counter", f"{CHECKPOINT}=taken")
    refused = wait_for(kubectl, "counter", "CheckpointRefused")
    assert "exists and is not an empty directory; name another place" in refused.message
    kubectl("annotate", "pod", "counter", f"{CHECKPOINT}=../escape", "--overwrite")
    assert "'../escape' is not a name" in wait_for(kubectl, "counter", "AnnotationMistaken").message
    assert operations(node, kubectl.namespace) == []


def test_misspelt_wish_to_be_restored_starts_nothing(kubectl: Kubectl, node: Node) -> None:
    kubectl.apply(pod("typo", *COUNTER, handler="kybernate", annotations={"kybernate.io/restore-form": "x"}))
    assert eventually(lambda: "did you mean kybernate.io/restore-from?" in kubectl("describe", "pod", "typo"))
    (status,) = kubectl.get("pod", "typo")["status"]["containerStatuses"]
    assert "running" not in status["state"]


def test_other_mistakes_are_events_with_the_nearest_right_key(kubectl: Kubectl, node: Node) -> None:
    wrong = {"kybernate.io/areana": "true", "kybernate.io/tcp": "establish", f"{FROM}.mian": "x"}
    kubectl.apply(pod("wrong", *COUNTER, handler="kybernate", annotations=wrong))
    kubectl.ready("pod/wrong")

    def said() -> list[str]:
        return [one.message for one in events_of(kubectl, "wrong") if one.reason == "AnnotationMistaken"]

    assert eventually(lambda: len(said()) == 3)
    words = "\n".join(said())
    assert "did you mean kybernate.io/arena?" in words
    assert '\'establish\' is not "close" or "established"' in words
    assert f"did you mean {FROM}.main?" in words


def test_annotation_on_a_pod_of_another_class_is_said_to_have_no_effect(kubectl: Kubectl, node: Node) -> None:
    kubectl.apply(pod("stock", *COUNTER, handler="runc", annotations={FROM: "x"}))
    kubectl.ready("pod/stock")
    ignored = wait_for(kubectl, "stock", "AnnotationIgnored")
    assert ignored.type == "Warning"
    assert "runtimeClassName" in ignored.message
