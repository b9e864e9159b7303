"""An image to and from S3 on loopback, against `rclone copy` with its best flags; and what a second image costs.

The server is `rclone serve s3` over memory. Both clients send the same random bytes, as files of an image. What comes
back is compared with its digests by our side alone: rclone does it here neither on the way nor afterwards.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from kybernate.store.keys import make_key
from kybernate.store.place import StorePlace, open_store
from kybernate.store.reader import fetch
from kybernate.store.sink import DirectorySink
from kybernate.store.source import DiskFile
from kybernate.store.transfer import Transfer
from kybernate.store.writer import ImageSource, store
from tests.bench.figures import Pair
from tests.contract.store.servers import ACCESS, BUCKET, OPTIONS, SECRET, Server, rclone

MIB = 1 << 20
FILES, FILE_MIB = 4, 256
CHANGED = 20  # one window of so many is changed: 5 %
BAR = 1 / 0.85
PARALLEL = 8  # requests; rclone has up to sixteen
NAMES = ("store.upload.rclone", "store.download.rclone", "store.second_image")
FLAGS = (
    *("--transfers=4", "--s3-chunk-size=32M", "--s3-upload-concurrency=4", "--multi-thread-streams=4"),
    *("--s3-disable-checksum", "--ignore-checksum", "--s3-use-unsigned-payload=true"),
    *("--s3-no-check-bucket", "--s3-no-head"),
)


@dataclass
class _Sides:
    """The two clients, each with what it has stored once for the downloads."""

    server: Server
    directory: Path
    numbers: Iterator[int] = field(default_factory=count)

    @property
    def image(self) -> Path:
        return self.directory / "image"

    def place(self, prefix: str) -> StorePlace:
        return StorePlace(
            f"s3://{BUCKET}/{prefix}", self.directory / "key", endpoint=self.server.endpoint, options=dict(OPTIONS)
        )

    def upload(self) -> float:
        prefix = f"ours-{next(self.numbers)}"
        cost = asyncio.run(self._store(prefix, "1"))
        self.forget(prefix)
        return cost

    def rclone_upload(self) -> float:
        prefix = f"rclone-{next(self.numbers)}"
        cost = self.rclone(str(self.image), f":s3:{BUCKET}/{prefix}")
        self.forget(prefix)
        return cost

    def download(self) -> float:
        back = self.directory / "back"
        back.mkdir()
        try:
            return asyncio.run(self._bring_back(back))
        finally:
            shutil.rmtree(back)

    def rclone_download(self) -> float:
        back = self.directory / "rclone-back"
        try:
            return self.rclone(f":s3:{BUCKET}/kept-rclone", str(back))
        finally:
            shutil.rmtree(back)

    def second_image(self) -> float:
        """Change one window of 2 MiB of each twenty, store the image again, and return the MiB that are sent."""
        transfer = Transfer()
        for path in self.image.iterdir():
            with path.open("r+b") as file:
                for offset in range(0, FILE_MIB * MIB, 2 * MIB * CHANGED):
                    file.seek(offset + MIB)
                    file.write(os.urandom(4096))
        asyncio.run(self._store("kept-ours", f"again-{next(self.numbers)}", transfer))
        return transfer.progress.sent_bytes / MIB

    def rclone(self, source: str, target: str) -> float:
        environment = {
            "RCLONE_CONFIG": "/dev/null",
            "RCLONE_S3_PROVIDER": "Other",
            "RCLONE_S3_ACCESS_KEY_ID": ACCESS,
            "RCLONE_S3_SECRET_ACCESS_KEY": SECRET,
            "RCLONE_S3_ENDPOINT": self.server.endpoint,
        }
        argv = [str(Path(sys.executable).with_name("rclone")), "copy", *FLAGS, source, target]
        begin = time.perf_counter()
        subprocess.run(argv, check=True, env=os.environ | environment)
        return time.perf_counter() - begin

    def forget(self, prefix: str) -> None:
        shutil.rmtree(self.server.directory / "data" / BUCKET / prefix)

    async def _store(self, prefix: str, id: str, transfer: Transfer | None = None) -> float:
        target = await open_store(self.place(prefix)).open(create=True)
        files = tuple(DiskFile(path, path.stat().st_size) for path in sorted(self.image.iterdir()))
        begin = time.perf_counter()
        source = ImageSource(id, "team-a", "web", 1.0, b"manifest", files)
        await store(target, source, transfer or Transfer(parallel=PARALLEL))
        return time.perf_counter() - begin

    async def _bring_back(self, back: Path) -> float:
        begin = time.perf_counter()
        target = await open_store(self.place("kept-ours")).open()
        recipe = await target.recipe("team-a", "1")
        sink = DirectorySink(back, {file.name: file.size for file in recipe.files})
        await fetch(target, recipe, sink, Transfer(parallel=PARALLEL))
        sink.close()
        return time.perf_counter() - begin

    def prepare(self) -> None:
        make_key(self.directory / "key")
        self.image.mkdir()
        for number in range(FILES):
            with (self.image / f"kybernate-vram-{number}-0.bin").open("wb") as file:
                for _ in range(FILE_MIB):
                    file.write(os.urandom(MIB))
        asyncio.run(self._store("kept-ours", "1"))
        self.rclone(str(self.image), f":s3:{BUCKET}/kept-rclone")


def pairs() -> Iterator[Pair]:
    """Yield the comparisons."""
    directory = Path(tempfile.mkdtemp(prefix="store-", dir="/dev/shm"))
    try:
        with rclone(directory) as server:
            sides = _Sides(server, directory)
            sides.prepare()
            yield Pair("store.upload.rclone", sides.upload, sides.rclone_upload, BAR)
            yield Pair("store.download.rclone", sides.download, sides.rclone_download, BAR)
            tenth = partial(float, FILES * FILE_MIB / 10)
            yield Pair("store.second_image", sides.second_image, tenth, 1.0, "MiB", within=1)
    finally:
        shutil.rmtree(directory)
