"""A node with an arena and an OCI runtime that can be held before and after a dump."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate_shim.arena.memory import Memory
from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import kybernate
from tests.system.ctr import eventually
from tests.system.gpu.daemon_killed import HELD, PLACE, RUNTIME, SIZE, configure
from tests.system.programs import script


@pytest.fixture(scope="module", autouse=True)
def node() -> Iterator[Gpus]:
    with gpu.node_with_arena(SIZE) as gpus:
        HELD.parent.mkdir()
        runtime = script(HELD, RUNTIME)
        PLACE.mkdir()
        configure(runtime, "fast")
        yield gpus
        PLACE.rmdir()
        runtime.unlink()
        HELD.parent.rmdir()


@pytest.fixture
def gpus(node: Gpus) -> Iterator[Gpus]:
    """The GPUs, on which nothing may be left, nor in the arena."""
    yield node
    gpu.heal(node)
    configure(HELD, "fast")
    gpu.kill_helpers()
    eventually(lambda: node.used() == [0, 0])
    assert Memory(SIZE).free() == SIZE
    kybernate("cuda", "state", "--pid", str(os.getpid()))


@pytest.fixture
def image() -> Iterator[Path]:
    """A place where the driver's own files cannot be mapped, so that bytes have to be moved."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        yield Path(directory, "image")
