"""GPU state through every door of a checkpoint, on pretended cards: the numbers go on, and the card is free meanwhile.

The real driver is tested by tests/gpu.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from kybernate.messages import cri_config_pb2
from kybernate.messages import cri_runtime_pb2 as wire
from kybernate_shim.checkpoint.image import read_image
from kybernate_shim.cuda import pages
from kybernate_shim.linux.ptrace import Held
from tests.documentation import block
from tests.fakes.cuda import Cards
from tests.system import gpu
from tests.system.checkpoints import PYTHON, assert_no_image, assert_whole, kybernate, refused
from tests.system.checkpoints import shim_of as daemon_of
from tests.system.cri import Cri, Pod
from tests.system.ctr import BUNDLES, CommandFailed, Ctr, eventually, run


@pytest.fixture(scope="module", autouse=True)
def node() -> Iterator[Cards]:
    """A node with two cards, whose helper runs already: a test starts and ends with the same processes."""
    cards = gpu.install_driver()
    kybernate("cuda", "state", "--pid", str(os.getpid()))
    yield cards
    gpu.forget_helper()
    gpu.remove_driver()


@pytest.fixture
def cards(node: Cards) -> Iterator[Cards]:
    yield node
    gpu.heal(node)
    eventually(lambda: node.used() == [0, 0])


@pytest.fixture
def ctr(cards: Cards) -> Ctr:
    return Ctr()


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "image"
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture
def hasty() -> Iterator[None]:
    """Deadlines that a test can wait for."""
    config = Path("/etc/kybernate/shim.toml")
    config.parent.mkdir(exist_ok=True)
    config.write_text("[gpu]\nlock = 1\ncheckpoint = 1\nrestore = 1\nunlock = 1\n")
    yield
    config.unlink()


# -- doors -------------------------------------------------------------------------------------------------------------


def test_checkpoint_frees_the_card_and_a_new_container_computes_on(ctr: Ctr, cards: Cards, image: Path) -> None:
    log = image.parent / "log"
    with gpu.computing(ctr, log=log) as container:
        used = cards.used()
        answer = json.loads(kybernate("checkpoint", container.id, str(image), "--exit", "--json"))
        eventually(lambda: cards.used() == [0, 0])
        names = [step["name"] for step in answer["steps"]]
        assert names.index("cuda-lock") < names.index("cuda-checkpoint") < names.index("dump")
        manifest = assert_whole(image)
        (held,) = manifest.gpus
        assert (held.uuid, held.model, held.driver) == (cards.uuids[0], "Pretended H200", "580.159.04")
        assert [process.bytes for process in held.processes] == [used[0]]
        assert manifest.cuda_processes == held.processes
        assert {process.pid for process in held.processes} <= {process.pid for process in manifest.processes}
        assert list(manifest.visible_gpus) == cards.uuids[:1]
    with gpu.computing_again(ctr, image, log) as again:
        again.computes_on()
        assert cards.used() == used


@pytest.mark.parametrize("devices", [(), gpu.both()], ids=["one card", "either card"])
def test_node_that_names_no_holders_restores_all_the_same(
    ctr: Ctr, cards: Cards, image: Path, devices: list[str]
) -> None:
    """NVML hides processes from containers and other pid namespaces; the driver's answer is what counts."""
    cards.hide_holders()
    log = image.parent / "log"
    with gpu.computing(ctr, log=log, flags=devices) as container:
        used = cards.used()
        kybernate("suspend", container.id)
        kybernate("resume", container.id)
        kybernate("checkpoint", container.id, str(image), "--exit")
        manifest = assert_whole(image)
        (held,) = manifest.cuda_processes
        assert held.pid in {process.pid for process in manifest.processes}
        assert 2 << 20 <= held.bytes <= used[0]
        assert [one.uuid for one in manifest.gpus] == cards.uuids[: 2 if devices else 1]
        assert [list(one.processes) for one in manifest.gpus] == ([[], []] if devices else [[held]])
    with gpu.computing_again(ctr, image, log, flags=devices) as again:
        again.computes_on()
        assert cards.used() == used
    if not devices:
        with gpu.computing_again(ctr, image, log, device="/dev/nvidia1") as again:
            eventually(lambda: cards.used() == used[::-1])


def test_process_that_somebody_suspended_before_is_in_the_image(ctr: Ctr, cards: Cards, image: Path) -> None:
    """Nobody knows what it held, for it has left its card, but it must not come back locked."""
    log = image.parent / "log"
    with gpu.computing(ctr, log=log) as container:
        used = cards.used()
        for verb in ("lock", "checkpoint"):
            kybernate("cuda", verb, "--pid", str(ctr.pid(container.id)))
        kybernate("checkpoint", container.id, str(image), "--exit")
        assert [held.bytes for held in assert_whole(image).cuda_processes] == [0]
    with gpu.computing_again(ctr, image, log) as again:
        again.computes_on()
        assert cards.used() == used


@pytest.mark.parametrize("programs", [2, 8])
def test_all_processes_of_a_container_come_back(ctr: Ctr, cards: Cards, image: Path, programs: int) -> None:
    log = image.parent / "log"
    argv = gpu.command(programs, devices=[0, 1])
    with gpu.computing(ctr, *argv, programs=programs, log=log, flags=gpu.both()) as container:
        used = cards.used()
        kybernate("checkpoint", container.id, str(image))
        container.computes_on()
        kybernate("checkpoint", container.id, f"{image}2", "--exit")
        assert sum(len(held.processes) for held in assert_whole(Path(f"{image}2")).gpus) == programs
    with gpu.computing_again(ctr, Path(f"{image}2"), log, programs=programs, flags=gpu.both()) as again:
        again.computes_on(seconds=40)
        assert cards.used() == used


def test_paused_container_stays_paused_after_its_checkpoint(ctr: Ctr, cards: Cards, image: Path) -> None:
    with gpu.computing(ctr) as container:
        used = cards.used()
        ctr("task", "pause", container.id)
        kybernate("checkpoint", container.id, str(image))
        assert (ctr.status(container.id), cards.used()) == ("PAUSED", used)
        container.stands_still()
        ctr("task", "resume", container.id)
        container.computes_on()


def test_containerds_own_checkpoint_carries_gpu_state(ctr: Ctr, cards: Cards) -> None:
    with gpu.computing(ctr) as container:
        name = ctr("task", "checkpoint", container.id).strip()
        try:
            container.computes_on()
        finally:
            ctr("images", "rm", "--sync", name)


def test_container_checkpoint_restores_live_into_a_new_container(ctr: Ctr, cards: Cards) -> None:
    name, new = f"localhost:5000/checkpoint/{ctr.new_id('ck')}:1", ctr.new_id("restored")
    with gpu.computing(ctr) as container:
        used = cards.used()
        ctr("container", "checkpoint", "--task", container.id, name)
    eventually(lambda: cards.used() == [0, 0])
    try:
        ctr("container", "restore", "--live", new, name)
        assert cards.used() == used
        (process,) = json.loads(kybernate("cuda", "state", "--pid", str(ctr.pid(new)), "--json"))["processes"]
        assert process["state"] == "running"
    finally:
        ctr.remove(new)
        ctr("images", "rm", "--sync", name)
        run(["sh", "-c", "rm -rf /tmp/ctrd-checkpoint*"])  # containerd never removes them


@pytest.fixture
def cri(cards: Cards) -> Iterator[Cri]:
    cri = Cri()
    yield cri
    cri.close()


def pod_container(cri: Cri, pod: Pod, argv: list[str], **options: str) -> str:
    """Start a container that gets card 0 from NVIDIA's runtime, as pods do."""
    mounts = [cri_config_pb2.Mount(container_path=str(gpu.CARDS), host_path=str(gpu.CARDS))]
    env = {"NVIDIA_VISIBLE_DEVICES": "0", "LD_LIBRARY_PATH": gpu.INSIDE}
    return cri.run(pod, "computes", argv, image=options.pop("image", PYTHON), env=env, mounts=mounts)


def steps_of(cri: Cri, pod: Pod) -> list[int]:
    return [int(line.split()[1]) for line in cri.log(pod, "computes") if line.startswith("step ")]


def test_new_pod_computes_on_with_what_nvidias_runtime_adds(
    cri: Cri, cards: Cards, pods_image: Path, shim_config: Path
) -> None:
    shim_config.write_text("[gpu]\nvisible_devices_env = true\n")
    with cri.pod() as pod:
        id = pod_container(cri, pod, gpu.command())
        eventually(lambda: len(steps_of(cri, pod)) > 5, seconds=40)
        used = cards.used()
        kybernate("checkpoint", pod.config.metadata.name, str(pods_image), "--exit")
        eventually(lambda: cri.state(id) == "EXITED")
        last = steps_of(cri, pod)[-1]
    assert cards.used() == [0, 0]
    with cri.pod(annotations={"kybernate.io/restore-from": pods_image.name}) as pod:
        id = pod_container(cri, pod, ["/never/run"])
        steps = eventually(lambda: (found := steps_of(cri, pod)) and len(found) > 5 and found, seconds=40)
        assert steps == list(range(last + 1, last + 1 + len(steps)))
        assert cards.used() == used
        bundle = json.loads(next(BUNDLES.glob(f"k8s.io/{id}/config.json")).read_text())
        assert "/dev/nvidia0" in [device["path"] for device in bundle["linux"]["devices"]]


def test_cri_checkpoint_archive_restores(cri: Cri, cards: Cards, image: Path, shim_config: Path) -> None:
    shim_config.write_text("[gpu]\nvisible_devices_env = true\n")
    archive = image.parent / "checkpoint.tar"
    image.parent.mkdir(exist_ok=True)
    cri.pull(PYTHON)
    with cri.pod() as pod:
        id = pod_container(cri, pod, gpu.command())
        eventually(lambda: len(steps_of(cri, pod)) > 5, seconds=40)
        request = wire.CheckpointContainerRequest(container_id=id, location=str(archive), timeout=60)
        if " 1.7" in run(["containerd", "--version"]):
            with pytest.raises(grpc.RpcError, match=r"(?i)unimplemented|not implemented"):
                cri.call("CheckpointContainer", request)
            return
        cri.call("CheckpointContainer", request)
        last = steps_of(cri, pod)[-1]
        eventually(lambda: steps_of(cri, pod)[-1] > last + 3)
    with tarfile.open(archive) as tar:
        assert "checkpoint/kybernate-manifest.json" in {name.removeprefix("./") for name in tar.getnames()}
    with cri.pod() as pod:
        pod_container(cri, pod, [], image=str(archive))
        eventually(lambda: (steps_of(cri, pod) or [0])[-1] > last + 5, seconds=40)


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "what"),
    [
        ("state", "999"), ("state", "crash"),
        ("lock", "999"), ("lock", "hang"), ("lock", "hang-after"), ("lock", "crash"),
        ("checkpoint", "999"), ("checkpoint", "hang"), ("checkpoint", "hang-after"), ("checkpoint", "crash"),
    ],
)  # fmt: skip
def test_failure_on_the_way_out_leaves_the_container_computing(
    ctr: Ctr, cards: Cards, image: Path, hasty: None, verb: str, what: str
) -> None:
    with gpu.computing(ctr) as container:
        used = cards.used()
        cards.switch(f"{verb}:1:{what}@{ctr.pid(container.id)}")
        err = refused("kybernate", "checkpoint", container.id, str(image))
        assert f"CUDA {verb} of process {ctr.pid(container.id)}" in err
        assert "computes on" in err
        container.computes_on()
        assert cards.used() == used
        assert_no_image(image)
        kybernate("checkpoint", container.id, f"{image}2")
        container.computes_on()


@pytest.mark.parametrize("what", ["999", "hang", "hang-after", "crash"])
@pytest.mark.parametrize("verb", ["restore", "unlock"])
def test_failure_on_the_way_back_is_made_up_for(
    ctr: Ctr, cards: Cards, image: Path, hasty: None, verb: str, what: str
) -> None:
    """The first call fails; the image is complete, and the container computes on by the second."""
    with gpu.computing(ctr) as container:
        used = cards.used()
        cards.switch(f"{verb}:1:{what}")
        kybernate("checkpoint", container.id, str(image))
        container.computes_on(seconds=30)
        assert cards.used() == used
        assert_whole(image)


def test_container_that_cannot_come_back_keeps_its_image_and_can_be_resumed(
    ctr: Ctr, cards: Cards, image: Path
) -> None:
    with gpu.computing(ctr) as container:
        used = cards.used()
        cards.switch("restore:*:999")
        err = refused("kybernate", "checkpoint", container.id, str(image))
        assert "kybernate resume" in err
        assert cards.used() == [0, 0]
        assert_whole(image)
        assert "suspended" in kybernate("status", container.id)
        cards.switch("")
        kybernate("resume", container.id)
        container.computes_on()
        assert cards.used() == used


def test_failing_dump_leaves_the_container_computing(ctr: Ctr, cards: Cards, image: Path) -> None:
    failing_dump_does_no_harm(ctr, cards, image)


def failing_dump_does_no_harm(ctr: Ctr, cards: Cards, image: Path) -> None:
    criu, config = image.parent / "criu", Path("/etc/kybernate/shim.toml")
    criu.write_text('#!/bin/sh\ncase "$*" in *--version*) exec /usr/sbin/criu "$@";; *) exit 1;; esac\n')
    criu.chmod(0o755)
    config.parent.mkdir(exist_ok=True)
    config.write_text(f'criu = "{criu}"\n')
    try:
        with gpu.computing(ctr) as container:
            used = cards.used()
            refused("kybernate", "checkpoint", container.id, str(image))
            container.computes_on()
            assert cards.used() == used
            assert_no_image(image)
    finally:
        config.unlink()


def test_criu_loads_none_of_its_own_plugins(ctr: Ctr, cards: Cards, image: Path) -> None:
    """CRIU fails with a broken plugin: so this proves that neither dump nor restore looks where it looks by default."""
    log, broken = image.parent / "log", Path("/usr/lib/criu/broken_plugin.so")
    there = broken.parent.exists()
    broken.parent.mkdir(exist_ok=True)
    broken.write_text("no library")
    try:
        with gpu.computing(ctr, log=log) as container:
            kybernate("checkpoint", container.id, str(image), "--exit")
        with gpu.computing_again(ctr, image, log) as again:
            again.computes_on()
    finally:
        broken.unlink()
        if not there:
            broken.parent.rmdir()


def test_cuda_plugin_of_criu_is_refused_by_name(ctr: Ctr, cards: Cards, image: Path) -> None:
    plugin, config = image.parent / "cuda_plugin.so", Path("/etc/kybernate/shim.toml")
    plugin.parent.mkdir(exist_ok=True)
    plugin.touch()
    config.parent.mkdir(exist_ok=True)
    config.write_text(f'criu_libdir = "{plugin.parent}"\n')
    try:
        with gpu.computing(ctr) as container:
            assert str(plugin) in refused("kybernate", "checkpoint", container.id, str(image))
            container.computes_on()
            assert_no_image(image)
    finally:
        config.unlink()


def test_killed_daemon_leaves_nobody_locked(ctr: Ctr, cards: Cards) -> None:
    with gpu.computing(ctr) as other, gpu.computing(ctr) as container:
        pid = ctr.pid(container.id)
        cards.slow(1000)
        with gpu.begun("kybernate", "suspend", container.id) as suspend:
            eventually(lambda: gpu.noted_as_locked(pid))
            daemon_of(ctr, container.id).kill()
            assert suspend.wait(30)
        eventually(lambda: not Path(f"/proc/{pid}").exists())
        eventually(lambda: ctr.status(container.id) == "")
        cards.slow(0)
        other.computes_on()


def test_killed_helper_leaves_the_container_computing(ctr: Ctr, cards: Cards, image: Path) -> None:
    with gpu.computing(ctr, "/opt/cuda/computes", "2", "20", "0", "1500") as container:
        with gpu.begun("kybernate", "checkpoint", container.id, str(image)) as checkpoint:
            eventually(lambda: container.id and gpu.helpers()[0].children())
            gpu.kill_helpers()
            checkpoint.wait(60)
        container.computes_on(seconds=40)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_split_card_is_refused_before_anything_is_asked(ctr: Ctr, cards: Cards, image: Path) -> None:
    with gpu.computing(ctr) as container:
        (gpu.CARDS / "mig").write_text("1")
        err = refused("kybernate", "checkpoint", container.id, str(image), "--force")
        assert "MIG" in err
        assert cards.uuids[0] in err
        container.computes_on()
        assert_no_image(image)


def test_denied_driver_and_missing_calls_are_named(ctr: Ctr, cards: Cards, image: Path) -> None:
    with gpu.computing(ctr) as container:
        cards.driver(13010, "595.71.05")
        assert "595.71.05" in refused("kybernate", "suspend", container.id)
        gpu.heal(cards)
        cards.missing("cuCheckpointProcessRestore")
        assert "cuCheckpointProcessRestore" in refused("kybernate", "checkpoint", container.id, str(image))
        container.computes_on()


def test_signs_of_an_nccl_communicator_are_a_suspicion_that_force_overrides(
    ctr: Ctr, cards: Cards, image: Path
) -> None:
    pretends = ["--env", f"LD_PRELOAD={gpu.INSIDE}/libnccl.so.2", "--env", "WORLD_SIZE=2"]
    with gpu.computing(ctr, flags=pretends) as container:
        err = refused("kybernate", "checkpoint", container.id, str(image))
        assert "NCCL_P2P_DISABLE=1" in err
        assert "WORLD_SIZE=2" in err
        kybernate("checkpoint", container.id, str(image), "--force")
        container.computes_on()


def test_annotation_adds_the_environment_that_survives(ctr: Ctr, cards: Cards, image: Path) -> None:
    pretends = ["--env", f"LD_PRELOAD={gpu.INSIDE}/libnccl.so.2", "--env", "WORLD_SIZE=2"]
    safe = ["--annotation", "kybernate.io/nccl-safe=true", "--env", "NCCL_P2P_DISABLE=0"]
    with gpu.computing(ctr, flags=[*pretends, *safe]) as container:
        kybernate("checkpoint", container.id, str(image))
        container.computes_on()


def test_managed_memory_is_refused_with_its_evidence(ctr: Ctr, cards: Cards, image: Path) -> None:
    with gpu.computing(ctr, *gpu.command(mib=4), flags=["--env", "COMPUTES_MANAGED=1"]) as container:
        err = refused("kybernate", "checkpoint", container.id, str(image))
        assert "managed memory" in err
        assert "4 MiB of /dev/nvidia-uvm" in err
        container.computes_on()
        assert_no_image(image)


def test_too_little_memory_in_the_cgroup_is_refused(ctr: Ctr, cards: Cards, image: Path) -> None:
    limit = ["--memory-limit", str(300 << 20)]
    with gpu.computing(ctr, *gpu.command(mib=120), flags=limit) as container:
        assert "memory" in refused("kybernate", "suspend", container.id)
        container.computes_on()


# -- the data path -----------------------------------------------------------------------------------------------------


@pytest.fixture
def settings() -> Iterator[Callable[[str], None]]:
    """Write the `[gpu]` table of the node's settings."""
    config = Path("/etc/kybernate/shim.toml")
    config.parent.mkdir(exist_ok=True)
    yield lambda text: (config.write_text(f"[gpu]\n{text}\n"), None)[1]
    config.unlink(missing_ok=True)


def test_vram_travels_beside_criu(ctr: Ctr, cards: Cards, image: Path) -> None:
    log = image.parent / "log"
    with gpu.computing(ctr, *gpu.command(mib=64), log=log) as container:
        answer = json.loads(kybernate("checkpoint", container.id, str(image), "--json"))
        container.computes_on()
    names = [step["name"] for step in answer["steps"]]
    assert names.index("cuda-checkpoint") < names.index("vram-save") < names.index("dump")
    assert names.index("dump") < names.index("vram-load") < names.index("cuda-restore")
    manifest = assert_whole(image)
    (file,) = manifest.vram
    assert manifest.data_path.name == "fast"
    assert file.size >= 64 << 20
    assert next(one.digest for one in manifest.files if one.name == file.file) == file.digest
    pages = sum(one.size for one in manifest.files if one.name.startswith("pages-"))
    held = next(process.rss_bytes for process in manifest.processes if process.pid == file.pid)
    assert pages < 80 << 20, f"{pages} bytes went through CRIU, of a process with {held}"
    assert "verified" in kybernate("inspect", str(image), "--verify")


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory."""
    directory = tmp_path / "memory"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", directory], check=True)
    yield directory
    subprocess.run(["umount", directory], check=True)


@pytest.mark.parametrize("programs", [1, 3])
def test_driver_writes_into_an_image_in_memory(ctr: Ctr, cards: Cards, memory: Path, programs: int) -> None:
    log = memory.parent / "log"
    first, second = memory / "first", memory / "second"
    with gpu.computing(ctr, *gpu.command(programs, mib=16), programs=programs, log=log) as container:
        used = cards.used()
        kybernate("checkpoint", container.id, str(first))
        container.computes_on()
        kybernate("checkpoint", container.id, str(second), "--exit")
        eventually(lambda: cards.used() == [0, 0])
    for image in (first, second):
        manifest = assert_whole(image)
        assert (manifest.data_path.name, manifest.data_path.why) == ("fast", "the driver wrote into the image itself")
        assert len(manifest.vram) == programs
        assert sum(process.bytes for held in manifest.gpus for process in held.processes) == sum(used)
        assert "verified" in kybernate("inspect", str(image), "--verify")
    with gpu.computing_again(ctr, second, log, programs=programs) as again:
        again.computes_on()
        assert cards.used() == used


def test_vram_of_an_encrypted_image_is_in_memory_alone(
    ctr: Ctr, cards: Cards, image: Path, shim_config: Path, tmp_path: Path
) -> None:
    key, log = tmp_path / "image.key", image.parent / "log"
    key.write_text("11" * 32)
    key.chmod(0o600)
    shim_config.write_text(f'encryption_key = "{key}"\n')
    with gpu.computing(ctr, *gpu.command(mib=16), log=log) as container:
        used = cards.used()
        kybernate("checkpoint", container.id, str(image.with_name("first")))
        container.computes_on()
        kybernate("checkpoint", container.id, str(image), "--exit")
    manifest = read_image(image).manifest
    assert (manifest.data_path.name, manifest.data_path.why) == ("fast", "the driver wrote into the image itself")
    assert {path.name for path in image.glob("*vram*")} == {f"{file.file}.enc" for file in manifest.vram} != set()
    assert "verified" in kybernate("inspect", str(image), "--verify")
    with gpu.computing_again(ctr, image, log) as again:
        again.computes_on()
        assert cards.used() == used
        assert not Path("/run/kybernate/plain").exists()


@pytest.mark.parametrize("switch", ["checkpoint:1:999", "checkpoint:1:hang", "checkpoint:1:hang-after"])
def test_driver_that_fails_leaves_nothing_of_an_image_in_memory(
    ctr: Ctr, cards: Cards, memory: Path, hasty: None, switch: str
) -> None:
    image = memory / "image"
    with gpu.computing(ctr) as container:
        used, before = cards.used(), open_files(ctr.pid(container.id))
        cards.switch(f"{switch}@{ctr.pid(container.id)}")
        refused("kybernate", "checkpoint", container.id, str(image))
        container.computes_on()
        assert cards.used() == used
        assert_no_image(image)
        assert open_files(ctr.pid(container.id)) == before
        kybernate("checkpoint", container.id, f"{image}2")
        container.computes_on()
        assert assert_whole(Path(f"{image}2")).data_path.why == "the driver wrote into the image itself"


def test_failing_dump_into_memory_leaves_the_container_computing(ctr: Ctr, cards: Cards, memory: Path) -> None:
    failing_dump_does_no_harm(ctr, cards, memory / "image")


def open_files(pid: int) -> list[str]:
    """Return what a process has open, but for what the pretended driver opens anew each time."""
    names = (str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir())
    return sorted(name for name in names if "/held/" not in name and not name.startswith("socket:"))


@pytest.mark.parametrize("count", [1, 16])
def test_any_number_of_threads_moves_all_processes(
    ctr: Ctr, cards: Cards, image: Path, settings: Callable[[str], None], count: int
) -> None:
    settings(f'threads = {count}\nhuge_pages = "off"')
    log = image.parent / "log"
    with gpu.computing(ctr, *gpu.command(3, mib=9), programs=3, log=log) as container:
        kybernate("checkpoint", container.id, str(image), "--exit")
        assert len({file.pid for file in assert_whole(image).vram}) == 3
    with gpu.computing_again(ctr, image, log, programs=3) as again:
        again.computes_on()


def test_seccomp_profile_does_not_stand_in_the_way(ctr: Ctr, cards: Cards, image: Path) -> None:
    log = image.parent / "log"
    with gpu.computing(ctr, log=log, flags=["--seccomp"]) as container:
        assert "Seccomp:\t2" in Path(f"/proc/{ctr.pid(container.id)}/status").read_text()
        kybernate("checkpoint", container.id, str(image))
        container.computes_on()
        kybernate("checkpoint", container.id, f"{image}2", "--exit")
        assert assert_whole(Path(f"{image}2")).data_path.name == "fast"
    with gpu.computing_again(ctr, Path(f"{image}2"), log, flags=["--seccomp"]) as again:
        again.computes_on()


def test_plain_way_is_there_by_setting(ctr: Ctr, cards: Cards, image: Path, settings: Callable[[str], None]) -> None:
    settings('data_path = "plain"')
    log = image.parent / "log"
    with gpu.computing(ctr, log=log) as container:
        kybernate("checkpoint", container.id, str(image), "--exit")
    manifest = assert_whole(image)
    assert (manifest.data_path.name, manifest.vram) == ("plain", ())
    with gpu.computing_again(ctr, image, log) as again:
        again.computes_on()


def test_process_that_cannot_be_traced_goes_the_plain_way(ctr: Ctr, cards: Cards, image: Path) -> None:
    """Another tracer holds it until its memory is in the host's; CRIU, which traces, too, finds it free again."""
    with gpu.computing(ctr, *gpu.command(pause_ms=1000)) as container, ExitStack() as holding:
        before = container.steps()
        eventually(lambda: container.steps() != before)  # it pauses now, and is not in the driver's hands
        holding.enter_context(Held(ctr.pid(container.id), spare=lambda name: name.startswith("cuda")))
        with gpu.begun("kybernate", "checkpoint", container.id, str(image)) as checkpoint:
            eventually(lambda: cards.used() == [0, 0], seconds=30)
            holding.close()
            assert checkpoint.wait(30) == 0
        manifest = assert_whole(image)
        assert (manifest.data_path.name, manifest.vram) == ("plain", ())
        assert "traces it already" in manifest.data_path.why
        container.computes_on()


def test_wrong_byte_of_vram_stops_the_restore_before_the_process_runs(ctr: Ctr, cards: Cards, image: Path) -> None:
    log = image.parent / "log"
    with gpu.computing(ctr, log=log) as container:
        kybernate("checkpoint", container.id, str(image), "--exit")
    (vram,) = assert_whole(image).vram
    file = image / vram.file
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    before = log.read_text()
    with (
        pytest.raises(CommandFailed, match="does not hold the bytes that were saved"),
        gpu.computing_again(ctr, image, log),
    ):
        pass
    assert (log.read_text(), cards.used()) == (before, [0, 0])
    assert vram.file in kybernate("inspect", str(image), "--verify", status=1)


def test_killed_shim_leaves_the_nodes_huge_pages_as_they_were(
    ctr: Ctr, cards: Cards, settings: Callable[[str], None]
) -> None:
    settings('huge_pages = "node"')
    before = pages.SWITCH.read_text()
    with gpu.computing(ctr) as container:
        cards.slow(1000)
        with gpu.begun("kybernate", "suspend", container.id) as suspend:
            eventually(lambda: "[always]" in pages.SWITCH.read_text())
            daemon_of(ctr, container.id).kill()
            assert suspend.wait(30)
        eventually(lambda: pages.SWITCH.read_text() == before)
        eventually(lambda: ctr.status(container.id) == "")


# -- another card ------------------------------------------------------------------------------------------------------


def test_new_container_with_the_other_card_gets_the_state_there(ctr: Ctr, cards: Cards, image: Path) -> None:
    log = image.parent / "log"
    with gpu.computing(ctr, log=log) as container:
        used = cards.used()
        kybernate("checkpoint", container.id, str(image), "--exit")
    with gpu.computing_again(ctr, image, log, device="/dev/nvidia1") as again:
        again.computes_on()
        assert cards.used() == used[::-1]
        assert ctr.exec(again.id, "ls", "/dev/nvidia1")
        kybernate("suspend", again.id)
        kybernate("resume", again.id)
        again.computes_on()
        assert cards.used() == used[::-1]


def test_map_of_the_annotation_decides(ctr: Ctr, cards: Cards, image: Path) -> None:
    log = image.parent / "log"
    with gpu.computing(ctr, log=log) as container:
        used = cards.used()
        kybernate("checkpoint", container.id, str(image), "--exit")
    first, second = cards.uuids
    flags = ["--annotation", f"kybernate.io/gpu-map={first}={second}", *gpu.both()]
    with gpu.computing_again(ctr, image, log, flags=flags) as again:
        again.computes_on()
        assert cards.used() == used[::-1]


def test_restore_without_room_or_with_another_model_is_refused_first(ctr: Ctr, cards: Cards, image: Path) -> None:
    log = image.parent / "log"
    with gpu.computing(ctr, *gpu.command(mib=150), log=log) as container:
        kybernate("checkpoint", container.id, str(image), "--exit")
    with gpu.computing(ctr, *gpu.command(mib=350)) as other:
        with pytest.raises(CommandFailed, match="MiB free"), gpu.computing_again(ctr, image, log):
            pass
        other.computes_on(seconds=40)
    other = pytest.raises(CommandFailed, match="is a Pretended B200")
    with gpu.other_model(cards), other, gpu.computing_again(ctr, image, log):
        pass
    with gpu.computing_again(ctr, image, log) as again:
        again.computes_on(seconds=40)


# -- in place ----------------------------------------------------------------------------------------------------------


def test_suspend_and_resume_fifty_times(ctr: Ctr, cards: Cards) -> None:
    with gpu.computing(ctr, *gpu.command(pause_ms=1)) as container:
        used, daemon = cards.used(), daemon_of(ctr, container.id)
        descriptors = daemon.num_fds()
        for _ in range(50):
            answer = gpu.ask_shim(ctr, container.id, "Suspend")
            assert (answer.vram_bytes, cards.used()) == (used[0], [0, 0])
            assert gpu.ask_shim(ctr, container.id, "Resume").vram_bytes == used[0]
            assert cards.used() == used
        container.computes_on()
        assert daemon.num_fds() == descriptors


def test_first_suspend_of_the_readme(ctr: Ctr, cards: Cards) -> None:
    with gpu.computing(ctr) as container:
        used = cards.used()
        for line in block("README.md", "first-suspend").commands:
            run(["sh", "-exc", line.replace("trainer", container.id)])
            if " suspend " in line:
                assert cards.used() == [0, 0]
        assert cards.used() == used
        container.computes_on()


def test_time_out_of_a_resume_is_kept_to(ctr: Ctr, cards: Cards) -> None:
    """The driver's first restore hangs for ever, and would be waited for ten minutes as configured."""
    with gpu.computing(ctr) as container:
        kybernate("suspend", container.id)
        cards.switch("restore:1:hang")
        kybernate("resume", container.id, "--timeout", "1")
        container.computes_on()


def test_suspended_container_can_be_checkpointed_and_stays_suspended(ctr: Ctr, cards: Cards, image: Path) -> None:
    log = image.parent / "log"
    with gpu.computing(ctr, log=log) as container:
        used = cards.used()
        assert "suspended" in kybernate("suspend", container.id)
        container.stands_still()
        kybernate("suspend", container.id)
        kybernate("checkpoint", container.id, str(image))
        assert cards.used() == [0, 0]
        manifest = assert_whole(image)
        assert [process.bytes for process in manifest.gpus[0].processes] == [used[0]]
        assert (manifest.data_path.name, manifest.vram) == ("plain", ())
        kybernate("resume", container.id)
        container.computes_on()
        assert "waits" in refused("kybernate", "resume", container.id)
    log.unlink()
    with gpu.computing_again(ctr, image, log) as again:
        eventually(lambda: len(again.lines()) > 3)
        assert cards.used() == used


def test_pause_of_an_annotated_container_frees_the_card(ctr: Ctr, cards: Cards) -> None:
    with gpu.computing(ctr, flags=["--annotation", "kybernate.io/pause=suspend"]) as container:
        used = cards.used()
        ctr("task", "pause", container.id)
        assert (ctr.status(container.id), cards.used()) == ("PAUSED", [0, 0])
        ctr("task", "resume", container.id)
        container.computes_on()
        assert cards.used() == used


def test_resume_without_room_leaves_the_container_suspended(ctr: Ctr, cards: Cards) -> None:
    with gpu.computing(ctr, *gpu.command(mib=150)) as container:
        kybernate("suspend", container.id)
        with gpu.computing(ctr, *gpu.command(mib=350)):
            assert "MiB free" in refused("kybernate", "resume", container.id)
            container.stands_still()
        kybernate("resume", container.id)
        container.computes_on(seconds=40)


def test_container_without_gpu_state_has_nothing_to_suspend(ctr: Ctr, cards: Cards) -> None:
    with ctr.running("sleep", "1000") as id:
        assert "no process" in refused("kybernate", "suspend", id)


def test_process_that_somebody_left_locked_is_helped_by_hand(ctr: Ctr, cards: Cards) -> None:
    with gpu.computing(ctr) as container:
        pid = str(ctr.pid(container.id))
        assert "locked" in kybernate("cuda", "lock", "--pid", pid)
        container.stands_still()
        assert "CUDA_ERROR_ILLEGAL_STATE" in refused("kybernate", "cuda", "lock", "--pid", pid)
        kybernate("cuda", "checkpoint", "--pid", pid)
        assert cards.used() == [0, 0]
        kybernate("resume", container.id)
        container.computes_on()


def test_doctor_tells_what_the_node_can_do(cards: Cards) -> None:
    found = {one["subject"]: one for one in json.loads(kybernate("doctor", "--json"))}
    assert (found["CRIU"]["verdict"], found["GPU driver"]["verdict"]) == ("ok", "ok")
    assert all(found[uuid]["found"].startswith("Pretended H200") for uuid in cards.uuids)
    assert found["VRAM bytes"]["found"] == "beside CRIU, huge pages: process"
    cards.missing("cuCheckpointProcessLock")
    bad = json.loads(kybernate("doctor", "--json", status=1))
    assert any(one["verdict"] == "bad" and "cuCheckpointProcessLock" in one["found"] for one in bad)
