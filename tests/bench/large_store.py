"""A store of many chunks: what a collection and the statistics of it cost, in memory and in time.

Packs hold chunks of a few bytes each, sixteen to a pack as chunks of 2 MiB are; all else has its true size.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

from kybernate.store.format import index as indexes
from kybernate.store.format import recipe as recipes
from kybernate.store.format.pack import PackBuilder, object_name
from kybernate.store.format.recipe import Recipe, StoredFile
from kybernate.store.format.sealing import Sealed
from kybernate.store.gc import collect
from kybernate.store.keys import make_key, read_key
from kybernate.store.place import StorePlace, open_store
from kybernate.store.stats import stats
from tests.bench.figures import Pair

MANY, FEW = 1_000_000, 250_000
IMAGE_CHUNKS, PACK_CHUNKS = 8_000, 16
MOST_MIB = 300.0
LINEAR = 1.15  # times the cost of a quarter of the chunks, four times
KINDS = ("gc", "stats")
NAMES = tuple(f"store.{kind}.{what}" for kind in KINDS for what in ("rss", "linear"))


def pairs() -> Iterator[Pair]:
    """Yield the figures; each command is a process of its own."""
    directory = Path(tempfile.mkdtemp(prefix="store-"))
    try:
        for count in (MANY, FEW):
            fill(directory / str(count), count)
        measured = cache(lambda kind, count: _measure(directory / str(count), kind))
        for kind in KINDS:
            yield Pair(f"store.{kind}.rss", partial(_of, measured, kind, "mib"), lambda: MOST_MIB, 1.0, "MiB", within=1)
            yield Pair(
                f"store.{kind}.linear",
                lambda kind=kind: _measure(directory / str(MANY), kind)["seconds"],  # type: ignore[misc]
                lambda kind=kind: _measure(directory / str(FEW), kind)["seconds"] * MANY / FEW,  # type: ignore[misc]
                LINEAR,
            )
    finally:
        shutil.rmtree(directory)


def _of(measured: object, kind: str, what: str) -> float:
    return float(measured(kind, MANY)[what])  # type: ignore[operator]


def _measure(directory: Path, kind: str) -> dict[str, float]:
    argv = [sys.executable, "-m", "tests.bench.large_store", str(directory), kind]
    done = subprocess.run(argv, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def fill(directory: Path, count: int) -> None:
    """Make a store of `count` chunks in `directory`."""
    directory.mkdir(mode=0o700, parents=True)
    make_key(directory / "key")
    asyncio.run(open_store(_place(directory)).open(create=True))
    for number in range(0, count, IMAGE_CHUNKS):
        _image(directory, number, [os.urandom(32) for _ in range(min(IMAGE_CHUNKS, count - number))])


def _image(directory: Path, number: int, ids: list[bytes]) -> None:
    key, store, tables = read_key(directory / "key"), directory / "store", []
    for begin in range(0, len(ids), PACK_CHUNKS):
        builder = PackBuilder(key)
        for id in ids[begin : begin + PACK_CHUNKS]:
            builder.add(Sealed(id, 0, 8, b"contents"))
        pack = builder.finish()
        _write(store / object_name(pack.name), bytes(pack.content))
        tables.append((pack.name, pack.places))
    content = indexes.encode(key, tables)
    _write(store / indexes.name_of(content), content)
    file = StoredFile("pages-1.img", tuple((8, id) for id in ids))
    recipe = Recipe(f"id-{number}", "team-a", f"web-{number}", 1.0, b"manifest", (file,))
    _write(store / recipes.object_name("team-a", recipe.id), recipes.encode(key, recipe))


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _place(directory: Path) -> StorePlace:
    return StorePlace(f"file://{directory}/store", directory / "key")


async def _work(directory: Path, kind: str) -> None:
    store = await open_store(_place(directory)).open()
    try:
        found = await (collect(store) if kind == "gc" else stats(store))
        assert found.chunks
    finally:
        store.close()


if __name__ == "__main__":
    asyncio.run(_work(Path(sys.argv[1]), sys.argv[2]))
    used = resource.getrusage(resource.RUSAGE_SELF)
    # CPU time: what the disk does meanwhile says nothing of whether the work is linear.
    print(json.dumps({"seconds": used.ru_utime + used.ru_stime, "mib": used.ru_maxrss / 1024}))
