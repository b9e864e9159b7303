"""Images between memory and disk, against `dd` with the same access: direct I/O, flushed at the end.

The image has 4 GiB of random bytes, less where the machine has not the memory for it. Our side digests all bytes on
their way, compares them with the manifest, and publishes the image; `dd` copies the same files one after the other.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil

from kybernate.store.tiers.directory import DirectoryTier
from kybernate.store.tiers.tier import Ref
from kybernate.store.transfer import Transfer
from tests.bench.figures import Pair, seconds
from tests.fakes.sized_image import write_sized_image

GIB = 1 << 30
BAR = 1 / 0.85  # of the time that dd takes
NAMES = ("tiers.demote", "tiers.promote")
REF = Ref("team-a", "web", "1")


def pairs() -> Iterator[Pair]:
    """Yield the comparisons: memory to disk, and disk to memory."""
    size = int(os.environ.get("TIERS_BENCH_GIB", 4)) * GIB if psutil.virtual_memory().available > 14 * GIB else GIB
    with ExitStack() as stack:
        places = [Path(tempfile.mkdtemp(prefix="tiers", dir=place)) for place in ("/dev/shm", "/var/tmp")]
        for place in places:
            stack.callback(shutil.rmtree, place, ignore_errors=True)
        memory = DirectoryTier("ram", 1, places[0] / "images", durable=False)
        disk = DirectoryTier("disk", 2, places[1] / "images")
        write_sized_image(memory.root / REF.path, id="1", mib=size >> 20)
        yield Pair(
            "tiers.demote", lambda: _ours(memory, disk), lambda: _dd(memory.root, places[1] / "dd"), unit="s", bar=BAR
        )
        asyncio.run(_copy(memory, disk))
        shutil.rmtree(memory.root)
        yield Pair(
            "tiers.promote", lambda: _ours(disk, memory), lambda: _dd(disk.root, places[0] / "dd"), unit="s", bar=BAR
        )


def _ours(source: DirectoryTier, target: DirectoryTier) -> float:
    _drop_cache()
    taken = seconds(lambda: asyncio.run(_copy(source, target)))
    shutil.rmtree(target.root)
    return taken


async def _copy(source: DirectoryTier, target: DirectoryTier) -> None:
    await target.receive(await source.open(REF), Transfer())


def _dd(source: Path, target: Path) -> float:
    _drop_cache()
    target.mkdir()
    taken = seconds(lambda: [_dd_file(file, target / file.name) for file in (source / REF.path).iterdir()])
    shutil.rmtree(target)
    return taken


def _dd_file(source: Path, target: Path) -> None:
    """Copy one file: with direct I/O on the side that is a disk, whose cache is written at the end."""
    on_disk = "oflag=direct" if not str(target).startswith("/dev/shm") else "iflag=direct"
    words = ["bs=8M", on_disk] if source.stat().st_size >= 1 << 20 else ["bs=8M"]
    subprocess.run(["dd", f"if={source}", f"of={target}", *words, "conv=fsync"], check=True, capture_output=True)


def _drop_cache() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1\n")
