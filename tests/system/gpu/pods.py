"""Pods that compute on a pretended GPU, as NVIDIA's runtime gives it to them."""

from __future__ import annotations

from tests.messages import cri_config_pb2
from tests.system import gpu
from tests.system.checkpoints import PYTHON
from tests.system.cri import Cri, Pod


def pod_container(cri: Cri, pod: Pod, argv: list[str], **options: str) -> str:
    """Start a container that gets GPU 0 from NVIDIA's runtime, as pods do."""
    mounts = [
        cri_config_pb2.Mount(container_path=str(gpu.GPUS), host_path=str(gpu.GPUS)),
        cri_config_pb2.Mount(container_path=gpu.INSIDE, host_path=str(gpu.PROGRAMS), readonly=True),
    ]
    env = {"NVIDIA_VISIBLE_DEVICES": "0"}
    return cri.run(pod, "computes", argv, image=options.pop("image", PYTHON), env=env, mounts=mounts)


def steps_of(cri: Cri, pod: Pod) -> list[int]:
    return [int(line.split()[1]) for line in cri.log(pod, "computes") if line.startswith("step ")]
