"""Containers' GPUs, in each of the ways by which they are given: what was added is there after a restore.

NVIDIA's own runtime, and containerd, follow a specification that NVIDIA's generator has made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.linux.mount.mountinfo import read_mountinfo
from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import kybernate
from tests.system.cri import Cri
from tests.system.ctr import Ctr, eventually, run
from tests.system.gpu import toolkit
from tests.system.gpu.pods import pod_container, steps_of

NAME = "nvidia.com/gpu=0"
CONTAINERDS = "containerd's CDI"
WAYS = {
    "environment": gpu.visible(0),
    "annotation": ["--annotation", f"cdi.k8s.io/gpu={NAME}"],
    CONTAINERDS: ["--device", NAME],
}
RESTRICTIONS = {"ro", "rw", "nosuid", "nodev", "noexec"}
SEES = """
cat /proc/driver/nvidia/params /etc/vulkan/icd.d/nvidia_icd.json /usr/share/glvnd/egl_vendor.d/10_nvidia.json
python3 -c 'import ctypes; print(ctypes.CDLL("libcuda.so.1"))' | cut -d, -f1
ls -l /dev/nvidia* /run/nvidia-persistenced/socket
"""


def mounts_of(ctr: Ctr, id: str) -> dict[str, tuple[str, set[str]]]:
    """Return the mounts of a container, by their place, with what they allow."""
    return {str(one.path): (one.type, {*one.options} & RESTRICTIONS) for one in read_mountinfo(ctr.pid(id))}


def test_plain_device_nodes_and_a_mounted_driver_restore_too(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    """NVIDIA's runtime is chosen, and finds nothing to add."""
    log, inside = image.parent / "log", "/opt/driver"
    driver = f"type=bind,src={toolkit.LIBRARIES}/libcuda.so.1,dst={inside}/libcuda.so.1,options=rbind:ro"
    gives = ["--device", "/dev/nvidia0", "--mount", driver, "--env", f"LD_LIBRARY_PATH={inside}"]
    with gpu.computing(ctr, log=log, gives=gives) as container:
        assert not any("nvidia-ctk-hook" in place for place in mounts_of(ctr, container.id))
        kybernate("checkpoint", container.id, str(image), "--exit")
    with gpu.computing_again(ctr, image, log, gives=gives) as again:
        again.computes_on()


@pytest.mark.parametrize("way", WAYS)
def test_restored_container_has_what_runtime_and_hooks_had_added(ctr: Ctr, gpus: Gpus, image: Path, way: str) -> None:
    if way == CONTAINERDS and " 1.7" in run(["containerd", "--version"]):
        pytest.skip("ctr of containerd 1.7 knows no CDI devices; its CRI does, and is tested below")
    log = image.parent / "log"
    with gpu.computing(ctr, log=log, gives=WAYS[way]) as container:
        mounts, seen = mounts_of(ctr, container.id), ctr.exec(container.id, "sh", "-c", SEES)
        assert "ModifyDeviceFiles: 0" in seen
        assert "libcuda.so.1" in seen
        assert {mounts[place][0] for place in mounts if place.startswith("/run/nvidia-ctk-hook/")} == {"tmpfs"}
        assert {"ro", "nosuid", "nodev"} <= mounts["/etc/vulkan/icd.d/nvidia_icd.json"][1]
        kybernate("checkpoint", container.id, str(image), "--exit")
    second = image.with_name("second")
    another = WAYS["annotation" if way == "environment" else "environment"]
    for source, gives in ((image, WAYS[way]), (second, another)):
        with gpu.computing_again(ctr, source, log, gives=gives) as again:
            again.computes_on()
            assert mounts_of(ctr, again.id) == mounts
            assert ctr.exec(again.id, "sh", "-c", SEES) == seen
            if source is image:
                kybernate("checkpoint", again.id, str(second), "--exit")


@pytest.mark.parametrize(
    "options",
    [{"devices": [NAME]}, {"annotations": {"cdi.k8s.io/gpu": NAME}}],
    ids=["CRI's devices", "annotation"],
)
def test_pod_with_a_cdi_device_continues_in_another(
    cri: Cri, gpus: Gpus, pods_image: Path, options: dict[str, Any]
) -> None:
    with cri.pod() as pod:
        id = pod_container(cri, pod, gpu.command(), **options)
        eventually(lambda: len(steps_of(cri, pod)) > 5, seconds=40)
        used = gpus.used()
        kybernate("checkpoint", pod.config.metadata.name, str(pods_image), "--exit")
        eventually(lambda: cri.state(id) == "CONTAINER_EXITED")
        last = steps_of(cri, pod)[-1]
    assert gpus.used() == [0, 0]
    with cri.pod(annotations={"kybernate.io/restore-from": pods_image.name}) as pod:
        pod_container(cri, pod, ["/never/run"], **options)
        steps = eventually(lambda: (found := steps_of(cri, pod)) and len(found) > 5 and found, seconds=40)
        assert steps == list(range(last + 1, last + 1 + len(steps)))
        assert gpus.used() == used
