"""GPU state through every entry point of a checkpoint: numbers continue, the GPU is free meanwhile.

The real driver is tested by tests/gpu.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import assert_whole, kybernate, refused
from tests.system.ctr import Ctr, eventually, run


def test_checkpoint_frees_the_gpu_and_a_new_container_computes_on(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    log = image.parent / "log"
    with gpu.computing(ctr, log=log) as container:
        used = gpus.used()
        answer = json.loads(kybernate("checkpoint", container.id, str(image), "--exit", "--json"))
        eventually(lambda: gpus.used() == [0, 0])
        names = [step["name"] for step in answer["steps"]]
        assert names.index("cuda-lock") < names.index("cuda-checkpoint") < names.index("dump")
        manifest = assert_whole(image)
        (held,) = manifest.gpus
        assert (held.uuid, held.model, held.driver) == (gpus.uuids[0], "Pretended H200", "580.159.04")
        assert [process.bytes for process in held.processes] == [used[0]]
        assert manifest.cuda_processes == held.processes
        assert {process.pid for process in held.processes} <= {process.pid for process in manifest.processes}
        assert list(manifest.visible_gpus) == gpus.uuids[:1]
    with gpu.computing_again(ctr, image, log) as again:
        again.computes_on()
        assert gpus.used() == used


@pytest.mark.parametrize("devices", [(), gpu.both()], ids=["one GPU", "either GPU"])
def test_node_that_names_no_holders_restores_all_the_same(
    ctr: Ctr, gpus: Gpus, image: Path, devices: list[str]
) -> None:
    """NVML hides processes from containers and other pid namespaces; the driver's answer is what counts."""
    gpus.hide_holders()
    log = image.parent / "log"
    with gpu.computing(ctr, log=log, flags=devices) as container:
        used = gpus.used()
        kybernate("suspend", container.id)
        kybernate("resume", container.id)
        kybernate("checkpoint", container.id, str(image), "--exit")
        manifest = assert_whole(image)
        (held,) = manifest.cuda_processes
        assert held.pid in {process.pid for process in manifest.processes}
        assert 2 << 20 <= held.bytes <= used[0]
        assert [one.uuid for one in manifest.gpus] == gpus.uuids[: 2 if devices else 1]
        assert [list(one.processes) for one in manifest.gpus] == ([[], []] if devices else [[held]])
    with gpu.computing_again(ctr, image, log, flags=devices) as again:
        again.computes_on()
        assert gpus.used() == used
    if not devices:
        with gpu.computing_again(ctr, image, log, device=1) as again:
            eventually(lambda: gpus.used() == used[::-1])


def test_process_that_somebody_suspended_before_is_in_the_image(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    """No process knows what it held, for it has left its GPU, but it must not come back locked."""
    log = image.parent / "log"
    with gpu.computing(ctr, log=log) as container:
        used = gpus.used()
        for verb in ("lock", "checkpoint"):
            kybernate("cuda", verb, "--pid", str(ctr.pid(container.id)))
        kybernate("checkpoint", container.id, str(image), "--exit")
        assert [held.bytes for held in assert_whole(image).cuda_processes] == [0]
    with gpu.computing_again(ctr, image, log) as again:
        again.computes_on()
        assert gpus.used() == used


@pytest.mark.parametrize("programs", [2, 8])
def test_all_processes_of_a_container_come_back(ctr: Ctr, gpus: Gpus, image: Path, programs: int) -> None:
    log = image.parent / "log"
    argv = gpu.command(programs, devices=[0, 1])
    with gpu.computing(ctr, *argv, programs=programs, log=log, flags=gpu.both()) as container:
        used = gpus.used()
        kybernate("checkpoint", container.id, str(image))
        container.computes_on()
        kybernate("checkpoint", container.id, f"{image}2", "--exit")
        assert sum(len(held.processes) for held in assert_whole(Path(f"{image}2")).gpus) == programs
    with gpu.computing_again(ctr, Path(f"{image}2"), log, programs=programs, flags=gpu.both()) as again:
        again.computes_on(seconds=40)
        assert gpus.used() == used


def test_paused_container_stays_paused_after_its_checkpoint(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    with gpu.computing(ctr) as container:
        used = gpus.used()
        ctr("task", "pause", container.id)
        kybernate("checkpoint", container.id, str(image))
        assert (ctr.status(container.id), gpus.used()) == ("PAUSED", used)
        container.stands_still()
        ctr("task", "resume", container.id)
        container.computes_on()


def test_containerds_own_checkpoint_carries_gpu_state(ctr: Ctr, gpus: Gpus) -> None:
    with gpu.computing(ctr) as container:
        name = ctr("task", "checkpoint", container.id).strip()
        try:
            container.computes_on()
        finally:
            ctr("images", "rm", "--sync", name)


def test_container_checkpoint_restores_live_into_a_new_container(ctr: Ctr, gpus: Gpus) -> None:
    name, new = f"localhost:5000/checkpoint/{ctr.new_id('ck')}:1", ctr.new_id("restored")
    with gpu.computing(ctr) as container:
        used = gpus.used()
        ctr("container", "checkpoint", "--task", container.id, name)
    eventually(lambda: gpus.used() == [0, 0])
    try:
        ctr("container", "restore", "--live", new, name)
        assert gpus.used() == used
        (process,) = json.loads(kybernate("cuda", "state", "--pid", str(ctr.pid(new)), "--json"))["processes"]
        assert process["state"] == "running"
    finally:
        ctr.remove(new)
        ctr("images", "rm", "--sync", name)
        run(["sh", "-c", "rm -rf /tmp/ctrd-checkpoint*"])  # containerd never removes them


def test_suspended_container_can_be_checkpointed_and_stays_suspended(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    log = image.parent / "log"
    with gpu.computing(ctr, log=log) as container:
        used = gpus.used()
        assert "suspended" in kybernate("suspend", container.id)
        container.stands_still()
        kybernate("suspend", container.id)
        kybernate("checkpoint", container.id, str(image))
        assert gpus.used() == [0, 0]
        manifest = assert_whole(image)
        assert [process.bytes for process in manifest.gpus[0].processes] == [used[0]]
        assert (manifest.data_path.name, manifest.vram) == ("plain", ())
        kybernate("resume", container.id)
        container.computes_on()
        assert "waits" in refused("kybernate", "resume", container.id)
    log.unlink()
    with gpu.computing_again(ctr, image, log) as again:
        eventually(lambda: len(again.lines()) > 3)
        assert gpus.used() == used


def test_held_container_leaves_its_gpu_to_others_until_it_is_released(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    with gpu.computing(ctr) as container:
        used = gpus.used()
        kybernate("checkpoint", container.id, str(image), "--hold")
        assert_whole(image)
        eventually(lambda: gpus.used() == [0, 0])
        container.stands_still()
        assert "cannot suspend a held container" in refused("kybernate", "resume", container.id)
        kybernate("release", container.id)
        container.computes_on()
        assert gpus.used() == used
        kybernate("suspend", container.id)  # its GPU state is as of any other
        kybernate("resume", container.id)
        container.computes_on()


def test_held_container_that_is_killed_computes_on_from_its_image(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    log = image.parent / "log"
    with gpu.computing(ctr, log=log) as container:
        used = gpus.used()
        kybernate("checkpoint", container.id, str(image), "--hold")
        ctr("task", "kill", "-s", "SIGTERM", container.id)
        eventually(lambda: ctr.status(container.id) == "STOPPED")
        eventually(lambda: gpus.used() == [0, 0])
    with gpu.computing_again(ctr, image, log) as again:
        again.computes_on()
        assert gpus.used() == used


def test_held_container_that_was_suspended_is_suspended_after_its_release(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    with gpu.computing(ctr) as container:
        kybernate("suspend", container.id)
        kybernate("checkpoint", container.id, str(image), "--hold")
        kybernate("release", container.id)
        (shown,) = [one for one in json.loads(kybernate("ps", "--json")) if one["container"] == container.id]
        assert (shown["state"], shown["suspended"]) == ("running", True)
        kybernate("resume", container.id)
        container.computes_on()
