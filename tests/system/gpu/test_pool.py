"""Images in memory, made of memory that the node keeps ready: taken by checkpoints, made again by the CUDA helper."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate_shim.arena.memory import Memory
from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import assert_whole, kybernate
from tests.system.ctr import Ctr, eventually

ARENA = 128 << 20
MIB = 16


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A directory on a tmpfs."""
    directory = Path(tempfile.mkdtemp(prefix="memory-"))
    subprocess.run(["mount", "-t", "tmpfs", "none", directory], check=True)
    yield directory
    subprocess.run(["umount", directory], check=True)
    directory.rmdir()


@pytest.fixture(scope="module", autouse=True)
def node(memory: Path) -> Iterator[Gpus]:
    """A node with a pool of one file and an arena."""
    pool = f'threads = 8\nimage_pool = "{memory}/pool"\nimage_pool_files = ["24MiB"]\n'
    with gpu.node_with_arena(ARENA, pool) as gpus:
        yield gpus


@pytest.fixture
def ctr(node: Gpus) -> Iterator[Ctr]:
    yield Ctr()
    gpu.heal(node)
    assert Memory(ARENA).free() == ARENA  # which forgets the copies of who has ended
    gpu.kill_helpers()  # with the context of the arena's worker
    kybernate("cuda", "state", "--pid", str(os.getpid()))


def ready(memory: Path) -> list[int]:
    """Return the inodes of what is ready, as soon as something is."""
    eventually(lambda: json.loads(kybernate("pool", "--json"))["ready_bytes"] == [24 << 20], seconds=60)
    return [file.stat().st_ino for file in (memory / "pool").iterdir()]


@pytest.mark.parametrize("flags", [[], ["--annotation", "kybernate.io/arena=true"]], ids=["driver", "arena"])
def test_image_is_made_of_memory_that_was_ready(ctr: Ctr, memory: Path, flags: list[str]) -> None:
    log, image = memory / "log", memory / "image"
    with gpu.computing(ctr, *gpu.command(mib=MIB), flags=flags, log=log) as container:
        before = ready(memory)  # made by the helper, a moment after the last call
        kybernate("checkpoint", container.id, str(image), "--exit")
        manifest = assert_whole(image)
        (file,) = [one.file for one in (manifest.arena or manifest.vram) if one.size >= MIB << 20]
        assert bool(flags) == bool(manifest.arena)
        assert [(image / file).stat().st_ino] == before
        assert "verified" in kybernate("inspect", str(image), "--verify")
        assert set(ready(memory)).isdisjoint(before)
    with gpu.computing_again(ctr, image, log, flags=flags) as again:
        again.computes_on()
    shutil.rmtree(image)
    log.unlink()
