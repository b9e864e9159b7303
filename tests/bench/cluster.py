"""Pods by kubectl in a cluster, of our handler and of containerd's own: until they are ready, until they are gone."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial

from tests.bench.figures import Pair
from tests.cluster.kubectl import Kubectl
from tests.cluster.pods import container, deployment, pod
from tests.system.ctr import eventually

OURS, STOCK = "kybernate", "runc"
CONTAINERS, PODS, REPLICAS = 20, 60, 30
SECONDS = 600
_numbers = itertools.count(1)

NAMES = (
    "cluster.pod", f"cluster.pod-of-{CONTAINERS}", f"cluster.pods-{PODS}", f"cluster.scale-up-{REPLICAS}",
    f"cluster.scale-down-{REPLICAS}",
)  # fmt: skip


def pairs() -> Iterator[Pair]:
    """Yield the comparisons. Images are on the node, and each measurement begins and ends without pods."""
    kubectl = Kubectl("bench")
    kubectl("create", "namespace", kubectl.namespace)
    kubectl.wait("create", "serviceaccount/default")
    works: tuple[Callable[[Kubectl, str], float], ...] = (
        partial(_ready, pods=1), partial(_ready, pods=1, containers=CONTAINERS), partial(_ready, pods=PODS),
        _scaled_up, _scaled_down,
    )  # fmt: skip
    for name, work in zip(NAMES, works, strict=True):
        yield Pair(name, partial(work, kubectl, OURS), partial(work, kubectl, STOCK))
    kubectl("delete", "namespace", kubectl.namespace)


def _ready(kubectl: Kubectl, handler: str, *, pods: int, containers: int = 1) -> float:
    """Return how long it takes from `kubectl apply` of the pods to the last one's readiness."""
    names = [f"pod-{next(_numbers)}" for _ in range(pods)]
    inside = [container(f"c{number}") for number in range(containers)]
    objects = [pod(name, handler=handler, containers=inside, terminationGracePeriodSeconds=1) for name in names]
    began = time.monotonic()
    kubectl.apply(*objects)
    kubectl.ready(*(f"pod/{name}" for name in names), seconds=SECONDS)
    took = time.monotonic() - began
    kubectl.delete(*(f"pod/{name}" for name in names))
    return took


def _scaled_up(kubectl: Kubectl, handler: str) -> float:
    return _scaled(kubectl, handler)[0]


def _scaled_down(kubectl: Kubectl, handler: str) -> float:
    return _scaled(kubectl, handler)[1]


def _scaled(kubectl: Kubectl, handler: str) -> tuple[float, float]:
    """Return how long a Deployment takes from none to all of its replicas, and back until the last pod is gone."""
    name = f"scaled-{next(_numbers)}"
    kubectl.apply(deployment(name, handler=handler, replicas=0, terminationGracePeriodSeconds=1))
    began = time.monotonic()
    kubectl("scale", f"deployment/{name}", f"--replicas={REPLICAS}")
    kubectl.rolled_out(f"deployment/{name}", seconds=SECONDS)
    up = time.monotonic()
    kubectl("scale", f"deployment/{name}", "--replicas=0")
    eventually(lambda: not kubectl.items("pods", "-l", f"app={name}"), seconds=SECONDS, pause=0.1)
    down = time.monotonic()
    kubectl.delete(f"deployment/{name}")
    return up - began, down - up
