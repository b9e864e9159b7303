"""Forked children of a program whose VRAM is in the arena: suspended, checkpointed like that, and restored."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.owner import ArenaOwner
from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import assert_whole, kybernate
from tests.system.ctr import Ctr, eventually
from tests.system.gpu.devices import flags

SIZE = 128 << 20
WANTED = ["--annotation", "kybernate.io/arena=true"]
PROGRAM = ["python3", f"{gpu.INSIDE}/forks.py"]
EPOCHS = ["python3", f"{gpu.INSIDE}/epochs.py", "2"]
BYTES = 2 << 20  # of VRAM that the program has
HEIRS = 4


@pytest.fixture(scope="module", autouse=True)
def node() -> Iterator[Gpus]:
    with gpu.node_with_arena(SIZE) as gpus:
        yield gpus


@pytest.fixture
def ctr(node: Gpus) -> Iterator[Ctr]:
    yield Ctr()
    gpu.heal(node)
    gpu.kill_helpers()
    eventually(lambda: node.used() == [0, 0])
    assert Memory(SIZE).free() == SIZE
    kybernate("cuda", "state", "--pid", str(os.getpid()))


def in_arena(ctr: Ctr, id: str) -> int:
    return sum(one.size for one in Memory(SIZE).kept(ArenaOwner.of(ctr.pid(id))))


def test_children_go_on_after_a_checkpoint_of_what_is_in_the_arena(
    ctr: Ctr, devices: list[str], tmp_path: Path
) -> None:
    log, first, second = tmp_path / "log", tmp_path / "first", tmp_path / "second"
    wanted = [*WANTED, *flags(devices)]
    with gpu.computing(ctr, *PROGRAM, log=log, flags=wanted) as container:
        kybernate("suspend", container.id)
        assert in_arena(ctr, container.id) == BYTES
        kybernate("checkpoint", container.id, str(first))
        assert in_arena(ctr, container.id) == BYTES
        manifest = assert_whole(first)
        assert len(manifest.released) == HEIRS
        assert sum(one.size for one in manifest.arena) >= BYTES
        container.stands_still()
        kybernate("resume", container.id)
        container.computes_on()
        kybernate("suspend", container.id)
        kybernate("checkpoint", container.id, str(second), "--exit")
    with gpu.computing_again(ctr, second, log, flags=wanted) as again:
        again.computes_on()
        assert "arena-take" in kybernate("suspend", again.id, "--json")
        kybernate("resume", again.id)
        again.computes_on()


def test_image_of_a_suspended_program_goes_on_with_its_children(ctr: Ctr, devices: list[str], tmp_path: Path) -> None:
    """The first image after a suspend: the children have released nothing before."""
    log, image = tmp_path / "log", tmp_path / "image"
    wanted = [*WANTED, *flags(devices)]
    with gpu.computing(ctr, *PROGRAM, log=log, flags=wanted) as container:
        kybernate("suspend", container.id)
        kybernate("checkpoint", container.id, str(image), "--exit")
        assert len(assert_whole(image).released) == HEIRS
    with gpu.computing_again(ctr, image, log, flags=wanted) as again:
        again.computes_on()


def test_workers_of_each_epoch_go_on_after_an_image_of_what_is_in_the_arena(
    ctr: Ctr, devices: list[str], tmp_path: Path
) -> None:
    """The workers come and go while the program is suspended, and while its image is written."""
    log, first, second = tmp_path / "log", tmp_path / "first", tmp_path / "second"
    wanted = [*WANTED, *flags(devices)]
    with gpu.computing(ctr, *EPOCHS, log=log, flags=wanted) as container:
        kybernate("checkpoint", container.id, str(first))
        container.computes_on()
        kybernate("suspend", container.id)
        kybernate("checkpoint", container.id, str(second), "--exit")
        assert sum(one.size for one in assert_whole(second).arena) >= BYTES
    with gpu.computing_again(ctr, second, log, flags=wanted) as again:
        again.computes_on()
        kybernate("suspend", again.id)
        kybernate("resume", again.id)
        again.computes_on()
