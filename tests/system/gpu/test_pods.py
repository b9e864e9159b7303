"""GPU state of pods: through CRI, with what NVIDIA's runtime adds to a bundle."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import PYTHON, kybernate
from tests.system.cri import Cri
from tests.system.ctr import BUNDLES, eventually
from tests.system.gpu.pods import pod_container, steps_of


def test_new_pod_computes_on_with_what_nvidias_runtime_adds(
    cri: Cri, gpus: Gpus, pods_image: Path, shim_config: Path
) -> None:
    shim_config.write_text("[gpu]\nvisible_devices_env = true\n")
    with cri.pod() as pod:
        id = pod_container(cri, pod, gpu.command())
        eventually(lambda: len(steps_of(cri, pod)) > 5, seconds=40)
        used = gpus.used()
        kybernate("checkpoint", pod.config.metadata.name, str(pods_image), "--exit")
        eventually(lambda: cri.state(id) == "CONTAINER_EXITED")
        last = steps_of(cri, pod)[-1]
    assert gpus.used() == [0, 0]
    with cri.pod(annotations={"kybernate.io/restore-from": pods_image.name}) as pod:
        id = pod_container(cri, pod, ["/never/run"])
        steps = eventually(lambda: (found := steps_of(cri, pod)) and len(found) > 5 and found, seconds=40)
        assert steps == list(range(last + 1, last + 1 + len(steps)))
        assert gpus.used() == used
        bundle = json.loads(next(BUNDLES.glob(f"k8s.io/{id}/config.json")).read_text())
        assert "/dev/nvidia0" in [device["path"] for device in bundle["linux"]["devices"]]


def test_cri_checkpoint_archive_restores(
    cri: Cri, cri_restore: None, gpus: Gpus, image: Path, shim_config: Path
) -> None:
    shim_config.write_text("[gpu]\nvisible_devices_env = true\n")
    archive = image.parent / "checkpoint.tar"
    image.parent.mkdir(exist_ok=True)
    cri.pull(PYTHON)
    with cri.pod() as pod:
        id = pod_container(cri, pod, gpu.command())
        eventually(lambda: len(steps_of(cri, pod)) > 5, seconds=40)
        cri.checkpoint(id, archive)
        last = steps_of(cri, pod)[-1]
        eventually(lambda: steps_of(cri, pod)[-1] > last + 3)
    with tarfile.open(archive) as tar:
        assert "checkpoint/kybernate-manifest.json" in {name.removeprefix("./") for name in tar.getnames()}
    with cri.pod() as pod:
        pod_container(cri, pod, [], image=str(archive))
        eventually(lambda: (steps_of(cri, pod) or [0])[-1] > last + 5, seconds=40)
