"""What a model's container is made of, and what containerd without CRI answers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from kybernate.node.failure import Refused, Unavailable
from kybernate.node.lookup import KnownContainer
from kybernate.up.models_file import Entry, parse
from kybernate.up.pods import ARENA, Pods
from kybernate_shim.oci.annotations import PRIORITY, SEAT


def entry(text: str) -> Entry:
    (found,) = parse(f"models: {{a: {{image: x{text}}}}}", "models.yaml", {}).models
    return found


@pytest.mark.parametrize(
    ("text", "value"), [(", gpus: [0]", "true"), (", gpus: [0], arena: false", "false"), ("", None)]
)
def test_arena_is_asked_for_by_models_with_gpus(text: str, value: str | None) -> None:
    with Pods("lab", "unix:///nowhere") as pods:
        one = entry(text)
        container = pods._container(one, pods._pod(one), "")
    assert dict(container.annotations) == ({ARENA: value} if value else {})


def test_seat_is_claimed_as_by_a_container_without_kubernetes() -> None:
    with Pods("lab", "unix:///nowhere") as pods:
        one = entry(", seat: large, priority: 3")
        pod = pods._pod(one)
        container = pods._container(one, pod, "")
    assert (container.annotations[SEAT], container.annotations[PRIORITY]) == ("large", "3")
    assert container.labels[PRIORITY] == "3"  # before that of an image
    uid = pod.metadata.uid
    assert container.labels["io.kubernetes.pod.uid"] == uid
    assert not KnownContainer("k8s.io", "1", pod="a", pod_uid=uid).in_kubernetes
    assert KnownContainer("k8s.io", "1", pod="a", pod_uid="8f0c1c5e-0f0e-4a43-9d3e-1f2b3c4d5e6f").in_kubernetes
    assert KnownContainer("k8s.io", "1", pod="a").in_kubernetes


def test_containerd_without_cri_is_named_with_its_remedy(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/containerd.sock"
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_insecure_port(address)
    server.start()
    try:
        with Pods("lab", address) as pods, pytest.raises(Refused, match="CRI is off") as refused:
            pods.list()
        assert "disabled_plugins" in refused.value.advice
    finally:
        server.stop(0).wait()
    with Pods("lab", address) as pods, pytest.raises(Unavailable, match="does not answer"):
        pods.list()
