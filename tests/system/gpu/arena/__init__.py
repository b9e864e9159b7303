"""Containers that suspend into the node's arena, on pretended GPUs, from the annotation to the reported steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from kybernate_shim.arena.memory import ArenaOwner, Memory
from kybernate_shim.arena.pieces import PIECE
from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import kybernate
from tests.system.ctr import Ctr

SIZE = 128 << 20
WANTED = ["--annotation", "kybernate.io/arena=true"]
MIB = 16
PIECES = 8


def in_arena(ctr: Ctr, id: str) -> int:
    return sum(one.size for one in Memory(SIZE).kept(ArenaOwner.of(ctr.pid(id))))


def pieces_copied(container: gpu.Holding) -> int:
    """Suspend and resume, and return how many pieces the suspend had to copy."""
    steps = json.loads(kybernate("suspend", container.id, "--json"))["steps"]
    kybernate("resume", container.id)
    assert container.is_right()
    (take,) = [step for step in steps if step["name"] == "arena-take"]
    assert take["bytes"] == PIECES * PIECE
    return int(take["bytes"] - take["spared_bytes"]) // PIECE


@contextmanager
def small_gpus(gpus: Gpus, size: int) -> Iterator[None]:
    """Let the GPUs be of `size` MiB for a while."""
    file = gpus.directory / "gpus"
    before = file.read_text()
    file.write_text(before.replace(str(512 << 20), str(size << 20)))
    try:
        yield
    finally:
        file.write_text(before)
