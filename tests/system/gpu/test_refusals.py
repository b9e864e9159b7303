"""What is refused before anything is changed, with the evidence that speaks against it."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import assert_no_image, kybernate, refused
from tests.system.ctr import Ctr


def test_split_gpu_is_refused_before_anything_is_asked(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    with gpu.computing(ctr) as container:
        (gpu.GPUS / "mig").write_text("1")
        err = refused("kybernate", "checkpoint", container.id, str(image), "--force")
        assert "MIG" in err
        assert gpus.uuids[0] in err
        container.computes_on()
        assert_no_image(image)


def test_denied_driver_and_missing_calls_are_named(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    with gpu.computing(ctr) as container:
        gpus.driver(13010, "595.71.05")
        assert "595.71.05" in refused("kybernate", "suspend", container.id)
        gpu.heal(gpus)
        gpus.missing("cuCheckpointProcessRestore")
        assert "cuCheckpointProcessRestore" in refused("kybernate", "checkpoint", container.id, str(image))
        container.computes_on()


def test_signs_of_an_nccl_communicator_are_a_suspicion_that_force_overrides(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    pretends = ["--env", f"LD_PRELOAD={gpu.INSIDE}/libnccl.so.2", "--env", "WORLD_SIZE=2"]
    with gpu.computing(ctr, flags=pretends) as container:
        err = refused("kybernate", "checkpoint", container.id, str(image))
        assert "NCCL_P2P_DISABLE=1" in err
        assert "WORLD_SIZE=2" in err
        kybernate("checkpoint", container.id, str(image), "--force")
        container.computes_on()


def test_annotation_adds_the_environment_that_survives(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    pretends = ["--env", f"LD_PRELOAD={gpu.INSIDE}/libnccl.so.2", "--env", "WORLD_SIZE=2"]
    safe = ["--annotation", "kybernate.io/nccl-safe=true", "--env", "NCCL_P2P_DISABLE=0"]
    with gpu.computing(ctr, flags=[*pretends, *safe]) as container:
        kybernate("checkpoint", container.id, str(image))
        container.computes_on()


def test_managed_memory_is_refused_with_its_evidence(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    with gpu.computing(ctr, *gpu.command(mib=4), flags=["--env", "COMPUTES_MANAGED=1"]) as container:
        err = refused("kybernate", "checkpoint", container.id, str(image))
        assert "managed memory" in err
        assert "4 MiB of /dev/nvidia-uvm" in err
        container.computes_on()
        assert_no_image(image)


def test_too_little_memory_in_the_cgroup_is_refused(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    limit = ["--memory-limit", str(300 << 20)]
    with gpu.computing(ctr, *gpu.command(mib=120), flags=limit) as container:
        assert "memory" in refused("kybernate", "suspend", container.id)
        container.computes_on()
