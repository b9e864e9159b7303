"""Which GPUs a pod has at a restore: those that it was given, whatever its author writes into the environment."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import kybernate
from tests.system.cri import Cri
from tests.system.ctr import eventually
from tests.system.gpu.conftest import cri, gpus, node  # noqa: F401  # fixtures
from tests.system.gpu.pods import pod_container, steps_of

# ruff: noqa: F811  (pytest finds fixtures by the names of parameters)


def test_the_environment_gives_a_pod_no_gpu(cri: Cri, gpus: Gpus, pods_image: Path) -> None:
    with cri.pod() as pod:
        id = pod_container(cri, pod, gpu.command())
        eventually(lambda: len(steps_of(cri, pod)) > 5, seconds=40)
        kybernate("checkpoint", pod.config.metadata.name, str(pods_image), "--exit")
        eventually(lambda: cri.state(id) == "CONTAINER_EXITED")
    with (
        cri.pod(annotations={"kybernate.io/restore-from": pods_image.name}) as pod,
        pytest.raises(grpc.RpcError, match=r"NVIDIA_VISIBLE_DEVICES counts only with `gpu\.visible_devices_env"),
    ):
        pod_container(cri, pod, ["/never/run"])
    assert gpus.used() == [0, 0]
