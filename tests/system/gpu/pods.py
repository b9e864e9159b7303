"""Pods that compute on a pretended GPU, as NVIDIA's runtime gives it to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kybernate.messages import cri_config_pb2
from tests.system import gpu
from tests.system.checkpoints import PYTHON
from tests.system.cri import Cri, Pod


def pod_container(
    cri: Cri, pod: Pod, argv: list[str], *, image: str = PYTHON, nulls: Sequence[str] = (), **options: Any
) -> str:
    """Start a container that gets GPU 0 from NVIDIA's runtime, as pods do; by other `options`, if there are any.

    `nulls` are places in the container where /dev/null is mounted.
    """
    mounts = [
        cri_config_pb2.Mount(container_path=str(gpu.GPUS), host_path=str(gpu.GPUS)),
        cri_config_pb2.Mount(container_path=gpu.INSIDE, host_path=str(gpu.PROGRAMS), readonly=True),
        *(cri_config_pb2.Mount(container_path=place, host_path="/dev/null") for place in nulls),
    ]
    options = options or {"env": {"NVIDIA_VISIBLE_DEVICES": "0"}}
    return cri.run(pod, "computes", argv, image=image, mounts=mounts, **options)


def steps_of(cri: Cri, pod: Pod) -> list[int]:
    return [int(line.split()[1]) for line in cri.log(pod, "computes") if line.startswith("step ")]
