"""A node with pretended GPUs and an arena."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kybernate_shim.arena.memory import Memory
from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import kybernate
from tests.system.ctr import eventually
from tests.system.gpu.arena import SIZE


@pytest.fixture(scope="module", autouse=True)
def node() -> Iterator[Gpus]:
    """A node whose helper runs already: a test starts and ends with the same processes."""
    with gpu.node_with_arena(SIZE) as gpus:
        yield gpus


@pytest.fixture
def gpus(node: Gpus) -> Iterator[Gpus]:
    """The GPUs; the context of the arena's worker is what a test may leave there."""
    yield node
    gpu.heal(node)
    gpu.kill_helpers()
    eventually(lambda: node.used() == [0, 0])
    assert Memory(SIZE).free() == SIZE  # which forgets the copies of who has ended
    kybernate("cuda", "state", "--pid", str(os.getpid()))
