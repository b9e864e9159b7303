"""Containers' GPUs, in each of the ways by which they are given: what was added is there after a restore.

NVIDIA's own runtime, and containerd, follow a specification that NVIDIA's generator has made.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
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
VOLUMES = "/var/run/nvidia-container-devices"  # a mount of /dev/null there names a GPU
RESTRICTIONS = {"ro", "rw", "nosuid", "nodev", "noexec"}
# What the generator is known to mount, by its place in a container: there, /var/run and /lib are links.
CLOSED = ("ro", "nosuid", "nodev")
ADDED = {
    **{f"{toolkit.LIBRARIES}/{name}.{toolkit.VERSION}": CLOSED for name in toolkit.NAMES},
    "/usr/share/glvnd/egl_vendor.d/10_nvidia.json": CLOSED,
    "/etc/vulkan/icd.d/nvidia_icd.json": CLOSED,
    "/usr/bin/nvidia-smi": CLOSED,
    "/etc/OpenCL/vendors/nvidia.icd": CLOSED,
    f"/usr/lib/firmware/nvidia/{toolkit.VERSION}/gsp_ga10x.bin": CLOSED,
    "/run/nvidia-container-devices/void": CLOSED,
    "/run/nvidia-persistenced/socket": ("rw", "nosuid", "nodev", "noexec"),
}
HOOKS = {
    "apply-cuda-memory-limits": "createRuntime",
    **dict.fromkeys(("create-symlinks", "update-ldcache", "disable-device-node-modification"), "createContainer"),
}
SEES = f"""
python3 -c 'print("entries", open("/etc/ld.so.cache", "rb").read().count(b"libcuda.so.1"))'
readlink {toolkit.LIBRARIES}/libcuda.so {toolkit.LIBRARIES}/libcuda.so.1
cat /etc/ld.so.conf.d/*nvcr*.conf /lib/firmware/nvidia/{toolkit.VERSION}/gsp_ga10x.bin
cat /proc/driver/nvidia/params /etc/vulkan/icd.d/nvidia_icd.json /usr/share/glvnd/egl_vendor.d/10_nvidia.json
python3 -c 'import ctypes; print(ctypes.CDLL("libcuda.so.1"))' | cut -d, -f1
ls -l /dev/nvidia* /run/nvidia-persistenced/socket
"""


def mounts_of(ctr: Ctr, id: str) -> dict[str, tuple[str, set[str]]]:
    """Return the mounts of a container, by their place, with what they allow."""
    return {str(one.path): (one.type, {*one.options} & RESTRICTIONS) for one in read_mountinfo(ctr.pid(id))}


def assert_added(mounts: dict[str, tuple[str, set[str]]], seen: str) -> None:
    """What generator and hooks are known to make is there by its name, so that their next version makes it, too."""
    assert {place: mounts.get(place, ("", set()))[1] for place in ADDED} == {
        place: set(options) for place, options in ADDED.items()
    }
    entries, *links = seen.splitlines()[:3]
    assert entries not in ("", "entries 0"), "the loader's cache has no driver"
    assert links == ["libcuda.so.1", f"libcuda.so.{toolkit.VERSION}"]
    assert {str(toolkit.LIBRARIES), "#!/bin/sh"} <= {*seen.splitlines()}  # the loader's folders; the firmware's content
    assert "ModifyDeviceFiles: 0" in seen
    assert "<CDLL 'libcuda.so.1'" in seen
    assert {mounts[place][0] for place in mounts if place.startswith("/run/nvidia-ctk-hook/")} == {"tmpfs"}


@contextmanager
def volumes_only() -> Iterator[None]:
    """Have NVIDIA's runtime take GPUs from mounts alone, as where pods may not choose theirs by the environment."""
    before = toolkit.CONFIG.read_text()
    accept = "accept-nvidia-visible-devices-"
    toolkit.CONFIG.write_text(f"{accept}as-volume-mounts = true\n{accept}envvar-when-unprivileged = false\n{before}")
    yield
    toolkit.CONFIG.write_text(before)


def volume(name: str) -> list[str]:
    """Return ctr's flags that give a GPU to a container by a mount, as the device plugin `volume-mounts` does."""
    mount = f"type=bind,src=/dev/null,dst={VOLUMES}/{name},options=rbind:ro"
    return ["--mount", mount, "--env", f"NVIDIA_VISIBLE_DEVICES={VOLUMES}"]


def test_generator_mounts_privately_and_names_each_hook(gpus: Gpus) -> None:
    made = json.loads(toolkit.SPECIFICATION.read_text())
    everything = [made["containerEdits"], *(device["containerEdits"] for device in made["devices"])]
    mounts = {mount["containerPath"]: mount["options"] for mount in made["containerEdits"]["mounts"]}
    libraries = [f"{toolkit.LIBRARIES}/{name}.{toolkit.VERSION}" for name in toolkit.NAMES]
    for place in (*libraries, f"/lib/firmware/nvidia/{toolkit.VERSION}/gsp_ga10x.bin"):
        assert {"ro", "nosuid", "nodev", "rprivate"} <= {*mounts[place]}, place
    hooks = [hook for edits in everything for hook in edits.get("hooks", ())]
    assert {hook["args"][1]: hook["hookName"] for hook in hooks if "args" in hook}.items() >= HOOKS.items()


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
        assert_added(mounts, seen)
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


def test_gpu_given_by_a_volume_is_another_one_after_each_restore(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    """A mount of /dev/null names it, by its number or its UUID; the environment gives nothing then."""
    log, second = image.parent / "log", image.with_name("second")
    with volumes_only():
        with gpu.computing(ctr, log=log, gives=volume("0")) as container:
            mounts, seen = mounts_of(ctr, container.id), ctr.exec(container.id, "sh", "-c", SEES)
            assert_added(mounts, seen)
            assert "/run/nvidia-container-devices/0" in mounts
            assert "/dev/nvidia1" not in seen
            kybernate("checkpoint", container.id, str(image), "--exit")
        with gpu.computing_again(ctr, image, log, gives=volume(gpus.uuids[1])) as again:
            again.computes_on()
            assert mounts_of(ctr, again.id) == mounts  # the names of the GPUs that its processes began with
            assert [used > 0 for used in gpus.used()] == [False, True]
            kybernate("checkpoint", again.id, str(second), "--exit")
    with gpu.computing_again(ctr, second, log, gives=gpu.visible(0)) as again:
        again.computes_on()
        assert [used > 0 for used in gpus.used()] == [True, False]


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


def test_pod_given_its_gpu_by_a_volume_continues_on_another_one(cri: Cri, gpus: Gpus, pods_image: Path) -> None:
    def given(number: int) -> dict[str, Any]:
        return {"nulls": [f"{VOLUMES}/{number}"], "env": {"NVIDIA_VISIBLE_DEVICES": VOLUMES}}

    with volumes_only():
        with cri.pod() as pod:
            id = pod_container(cri, pod, gpu.command(), **given(0))
            eventually(lambda: len(steps_of(cri, pod)) > 5, seconds=40)
            assert [used > 0 for used in gpus.used()] == [True, False]
            kybernate("checkpoint", pod.config.metadata.name, str(pods_image), "--exit")
            eventually(lambda: cri.state(id) == "CONTAINER_EXITED")
            last = steps_of(cri, pod)[-1]
        with cri.pod(annotations={"kybernate.io/restore-from": pods_image.name}) as pod:
            pod_container(cri, pod, ["/never/run"], **given(1))
            steps = eventually(lambda: (found := steps_of(cri, pod)) and len(found) > 5 and found, seconds=40)
            assert steps == list(range(last + 1, last + 1 + len(steps)))
            assert [used > 0 for used in gpus.used()] == [False, True]
