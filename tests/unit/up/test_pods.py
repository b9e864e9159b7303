"""What a model's container is made of, and what containerd without CRI answers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import grpc
import pytest

from kybernate.messages import cri_runtime_pb2 as wire
from kybernate.messages.cri_runtime_pb2_grpc import RuntimeServiceServicer, add_RuntimeServiceServicer_to_server
from kybernate.node.failure import Refused, Unavailable
from kybernate.node.lookup import KnownContainer
from kybernate.up import pods as pods_module
from kybernate.up.models_file import Entry, parse
from kybernate.up.pods import ARENA, Pods, Running
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


class Starting(RuntimeServiceServicer):
    """A containerd with a container that it still starts when it is to be removed at first."""

    def __init__(self, words: str) -> None:
        self.words, self.calls = [words, words], 0

    def StopPodSandbox(self, request: wire.StopPodSandboxRequest, context: Any) -> wire.StopPodSandboxResponse:  # noqa: N802  # the API's
        return wire.StopPodSandboxResponse()

    def RemovePodSandbox(self, request: wire.RemovePodSandboxRequest, context: Any) -> wire.RemovePodSandboxResponse:  # noqa: N802
        self.calls += 1
        if self.words:
            context.abort(grpc.StatusCode.UNKNOWN, self.words.pop())
        return wire.RemovePodSandboxResponse()


@pytest.mark.parametrize(
    ("words", "calls"), [("container is in starting state, can't be removed", 3), ("it is held by another one", 1)]
)
def test_container_that_is_still_started_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, calls: int
) -> None:
    monkeypatch.setattr(pods_module, "LOOK_SECONDS", 0.01)
    address, service = f"unix:{tmp_path}/containerd.sock", Starting(words)
    server = grpc.server(ThreadPoolExecutor(1))
    add_RuntimeServiceServicer_to_server(service, server)
    server.add_insecure_port(address)
    server.start()
    try:
        with Pods("lab", address) as pods, nullcontext() if calls > 1 else pytest.raises(Refused, match="held"):
            pods.remove(Running("a", "", "1"))
    finally:
        server.stop(0).wait()
    assert service.calls == calls
