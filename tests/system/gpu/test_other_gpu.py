"""Restores onto another GPU than the one that the image is of."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import kybernate
from tests.system.ctr import CommandFailed, Ctr


def test_new_container_with_the_other_gpu_gets_the_state_there(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    log = image.parent / "log"
    with gpu.computing(ctr, log=log) as container:
        used = gpus.used()
        kybernate("checkpoint", container.id, str(image), "--exit")
    with gpu.computing_again(ctr, image, log, device=1) as again:
        again.computes_on()
        assert gpus.used() == used[::-1]
        assert ctr.exec(again.id, "ls", "/dev/nvidia1")
        kybernate("suspend", again.id)
        kybernate("resume", again.id)
        again.computes_on()
        assert gpus.used() == used[::-1]


def test_map_of_the_annotation_decides(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    log = image.parent / "log"
    with gpu.computing(ctr, log=log) as container:
        used = gpus.used()
        kybernate("checkpoint", container.id, str(image), "--exit")
    first, second = gpus.uuids
    flags = ["--annotation", f"kybernate.io/gpu-map={first}={second}", *gpu.both()]
    with gpu.computing_again(ctr, image, log, flags=flags) as again:
        again.computes_on()
        assert gpus.used() == used[::-1]


def test_restore_without_room_or_with_another_model_is_refused_first(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    log = image.parent / "log"
    with gpu.computing(ctr, *gpu.command(mib=150), log=log) as container:
        kybernate("checkpoint", container.id, str(image), "--exit")
    with gpu.computing(ctr, *gpu.command(mib=350)) as other:
        with pytest.raises(CommandFailed, match="MiB free"), gpu.computing_again(ctr, image, log):
            pass
        other.computes_on(seconds=40)
    other = pytest.raises(CommandFailed, match="is a Pretended B200")
    with gpu.other_model(gpus), other, gpu.computing_again(ctr, image, log):
        pass
    with gpu.computing_again(ctr, image, log) as again:
        again.computes_on(seconds=40)
