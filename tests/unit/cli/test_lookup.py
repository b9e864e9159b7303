"""What a person calls a container, and which one is meant."""

from __future__ import annotations

import pytest

from kybernate.messages.agent_pb2 import Container
from kybernate.node.failure import Ambiguous, Missing
from kybernate.node.lookup import KnownContainer, resolve

POD, OTHER = "a" * 64, "b" * 64
WEB = KnownContainer(
    "k8s.io", "c0ffee" + "0" * 58, group=POD, pod_namespace="shop", pod="front", name="web", state=Container.RUNNING
)
LOG = KnownContainer(
    "k8s.io", "c0ff11" + "0" * 58, group=POD, pod_namespace="shop", pod="front", name="log", state=Container.PAUSED
)
PAUSE = KnownContainer(
    "k8s.io", POD, group=POD, pod_namespace="shop", pod="front", sandbox=True, state=Container.RUNNING
)
JOB = KnownContainer(
    "k8s.io", "d00d" + "0" * 60, group=OTHER, pod_namespace="shop", pod="job", name="main", state=Container.RUNNING
)
JOB_BEFORE = KnownContainer("k8s.io", "d11d" + "0" * 60, group=OTHER, pod_namespace="shop", pod="job", name="main")
TEST_JOB = KnownContainer(
    "k8s.io", "e" * 64, group="f" * 64, pod_namespace="test", pod="job", name="main", state=Container.RUNNING
)
COUNTER = KnownContainer("default", "counter", group="counter", state=Container.RUNNING)
COUNTER_2 = KnownContainer("default", "counter-2", group="counter-2", state=Container.RUNNING)
SAME_ID = KnownContainer("moby", "counter-2", group="counter-2", state=Container.RUNNING)
NODE = [WEB, LOG, PAUSE, JOB, JOB_BEFORE, TEST_JOB, COUNTER, COUNTER_2]


@pytest.mark.parametrize(
    ("query", "meant"),
    [
        ("counter", COUNTER),  # a whole id wins over the beginning of another
        ("counter-", COUNTER_2),
        (WEB.id, WEB),
        ("c0ffe", WEB),
        ("front/web", WEB),
        ("shop/front/log", LOG),
        ("shop/job", JOB),  # not the ended container of the same name
        ("d11", JOB_BEFORE),  # but that one can still be named
        ("test/job", TEST_JOB),
        ("test/job/main", TEST_JOB),
        (OTHER, JOB),  # the id of a pod means what runs in it
        ("bbbb", JOB),
        (POD, PAUSE),  # except where it is a container's own id in full
    ],
)
def test_name_means_container(query: str, meant: KnownContainer) -> None:
    assert resolve(query, NODE) == meant


@pytest.mark.parametrize(
    ("query", "listed"),
    [
        ("c0ff", (WEB, LOG)),
        ("front", (WEB, LOG)),
        ("shop/front", (WEB, LOG)),
        ("aaaa", (WEB, LOG)),
        ("job", (JOB, TEST_JOB)),
        ("job/main", (JOB, TEST_JOB)),
        ("counter-2", (COUNTER_2, SAME_ID)),
    ],
)
def test_ambiguous_name_lists_what_it_means(query: str, listed: tuple[KnownContainer, ...]) -> None:
    with pytest.raises(Ambiguous, match="is the name of") as raised:
        resolve(query, [*NODE, SAME_ID])
    assert f"is the name of {len(listed)} containers:" in str(raised.value)
    lines = str(raised.value).splitlines()[1:]
    assert sorted(line.split()[:2] for line in lines) == sorted([one.namespace, one.id] for one in listed)


@pytest.mark.parametrize("query", ["", "nobody", "front/nobody", "shop/front/web/x", "/", "shop", "test/front", "cafe"])
def test_unknown_name_is_not_found(query: str) -> None:
    with pytest.raises(Missing, match=r"no container has|no processes"):
        resolve(query, NODE)


def test_ended_containers_are_told_apart_when_none_lives() -> None:
    with pytest.raises(Ambiguous, match="no task"):
        resolve("d", [JOB_BEFORE, KnownContainer("k8s.io", "d22d")])
