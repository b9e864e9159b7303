"""Limits of a container's GPU memory that a hook of NVIDIA's sets, for the cgroup that a container starts in.

The hook gives them to the driver through NVML, where the node has cgroup v2 alone. It is not executed at a restore.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import kybernate
from tests.system.ctr import CommandFailed, Ctr

MIB = 1 << 20
LIMITS = ["--env", "NVIDIA_GPU_MEMORY_REQUEST=64", "--env", "NVIDIA_GPU_MEMORY_LIMIT=128"]
V2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()


def cgroup(ctr: Ctr, id: str) -> str:
    """Return where the container's cgroup is on the node."""
    (line,) = [line for line in Path(f"/proc/{ctr.pid(id)}/cgroup").read_text().splitlines() if line.startswith("0::")]
    return f"/sys/fs/cgroup{line.removeprefix('0::')}"


@pytest.mark.skipif(not V2, reason="NVIDIA's hook refuses where the node has cgroup v1, as the test below shows")
def test_limits_hold_from_the_start_and_not_after_a_restore(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    log = image.parent / "log"
    with gpu.computing(ctr, log=log, flags=LIMITS) as container:
        set_once = [(gpus.uuids[0], cgroup(ctr, container.id), 64 * MIB, 128 * MIB)]
        assert gpus.limits() == set_once
        kybernate("suspend", container.id)
        kybernate("resume", container.id)
        container.computes_on()
        assert gpus.limits() == set_once  # the cgroup is the same
        kybernate("checkpoint", container.id, str(image), "--exit")
    with gpu.computing_again(ctr, image, log, flags=LIMITS) as again:
        again.computes_on()
        assert cgroup(ctr, again.id) != set_once[0][1]
        assert gpus.limits() == set_once


@pytest.mark.skipif(V2, reason="the node has cgroup v2 alone")
def test_container_with_a_limit_restores_and_does_not_start_with_cgroup_v1(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    log = image.parent / "log"
    refused = pytest.raises(CommandFailed, match=r"GPU memory limits is only supported in cgroup v2")
    with refused, gpu.computing(ctr, flags=LIMITS):
        pass
    with gpu.computing(ctr, log=log) as container:
        kybernate("checkpoint", container.id, str(image), "--exit")
    with gpu.computing_again(ctr, image, log, flags=LIMITS) as again:
        again.computes_on()
    assert gpus.limits() == []


def test_container_without_a_limit_gets_none(ctr: Ctr, gpus: Gpus) -> None:
    with gpu.computing(ctr):
        assert gpus.limits() == []
