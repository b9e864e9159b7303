"""What can be full while an operation runs: the node's arena, the tmpfs of an image, a GPU."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from kybernate_shim.arena.owner import ArenaOwner
from tests.faults.bench import CONTEXT, MIB, PIECE, Bench

IMAGES_BYTES = 16 * MIB
SOMEWHERE = 1 << 40  # an address
PLACEHOLDER = 2 * MIB  # that the library keeps mapped where memory is away


@contextmanager
def full_arena(bench: Bench) -> Iterator[None]:
    """Let this process have all room that is left."""
    me = ArenaOwner.of(os.getpid())
    bench.memory.claim(me, [(0, SOMEWHERE, bench.memory.free())])
    try:
        yield
    finally:
        bench.memory.give_up(me)


@contextmanager
def full_images(bench: Bench) -> Iterator[None]:
    """Leave no page on the tmpfs of the images."""
    filler = bench.images / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, IMAGES_BYTES)
    try:
        yield
    finally:
        filler.unlink()


def full_gpu(bench: Bench) -> AbstractContextManager[None]:
    """Leave room for what the driver itself restores of a program, and half a piece of what the arena has."""
    return bench.gpus.occupied(0, leaving=CONTEXT + PLACEHOLDER + PIECE // 2)


SHORTAGES: dict[str, Callable[[Bench], AbstractContextManager[None]]] = {
    "arena": full_arena,
    "images": full_images,
    "gpu": full_gpu,
}


def mount_images(place: Path) -> None:
    place.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={IMAGES_BYTES},mode=700"]
    subprocess.run(["mount", *options, "images", place], check=True)


def unmount_images(place: Path) -> None:
    subprocess.run(["umount", place], check=True)
