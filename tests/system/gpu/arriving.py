"""Images that arrive from S3 for a restore, held back at will: what tests of that share."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from kybernate.store.format import index as indexes
from kybernate.store.format.pack import object_name
from kybernate.store.keys import read_key
from kybernate.store.objects import Objects
from kybernate.store.place import StorePlace, open_store
from tests.contract.store.servers import ACCESS, BUCKET, OPTIONS, SECRET, Server, usual
from tests.contract.store.slowed import SlowedServer, slowed
from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import kybernate, refused
from tests.system.ctr import Ctr, eventually, finished
from tests.system.gpu.programs import Computing

MIB = 24  # of VRAM: CRIU's files, which have as much, and the first of it are in one pack, the rest in another
IMAGES = Path("/var/lib/kybernate/checkpoints")
MEMORY = Path("/run/kybernate/arriving")
AGENT = Path("/etc/kybernate/agent.toml")


@dataclass
class Store:
    """A store with one image, behind a server that can be slowed."""

    server: Server
    slowed: SlowedServer
    key: Path

    def last_pack(self) -> str:
        """Return the pack that was sent last, with what a restore needs last: an index has them in their order."""
        objects, key = self._objects(), read_key(self.key)

        async def found() -> str:
            (index,) = [one.name async for one in objects.list(indexes.PREFIX)]
            return [name for name, _ in indexes.tables(key, await objects.get(index))][-1]

        return asyncio.run(found())

    def flip_a_bit_of(self, pack: str) -> None:
        objects, name = self._objects(), object_name(pack)

        async def flipped() -> None:
            content = bytearray(await objects.get(name))
            content[len(content) // 2] ^= 1
            await objects.put(name, content)

        asyncio.run(flipped())

    def _objects(self) -> Objects:
        place = StorePlace(f"s3://{BUCKET}/node", self.key, endpoint=self.server.endpoint, options=OPTIONS)
        return open_store(place).objects


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    (tmp_path / "server").mkdir()
    with usual(tmp_path / "server") as server, slowed(server.port) as proxy:
        AGENT.parent.mkdir(exist_ok=True)
        AGENT.write_text(
            f'[store]\nurl = "s3://{BUCKET}/node"\nendpoint = "{proxy.endpoint}"\nlevel = 1\nparallel = 1\n'
            f'key = "{tmp_path}/store.key"\n'
        )
        kybernate("store", "init")
        yield Store(server, proxy, tmp_path / "store.key")
    AGENT.unlink()


@pytest.fixture
def name() -> Iterator[str]:
    """Of an image below the node's root, where none is left."""
    name = f"arriving-{os.getpid()}"
    yield name
    shutil.rmtree(IMAGES / name, ignore_errors=True)


def put(ctr: Ctr, name: str, log: Path, flags: Sequence[str] = ()) -> None:
    """Checkpoint a container that computes, and have its image in the store alone."""
    with gpu.computing(ctr, *gpu.command(mib=MIB), log=log, flags=flags) as container:
        kybernate("checkpoint", container.id, name, "--exit")
    kybernate("store", "put", name)
    shutil.rmtree(IMAGES / name)


def command(name: str, id: str, log: Path) -> list[str]:
    return ["kybernate", "restore", "--from", "store", name, "--name", id, "--detach", "--log", str(log), "--json"]


@contextmanager
def restored(ctr: Ctr, id: str, log: Path) -> Iterator[Computing]:
    try:
        yield Computing(id, log)
    finally:
        Ctr(ctr.runtime, ctr.namespace).remove(id)


def waiting(id: str) -> dict[str, int]:
    """Return the status of a container whose restore waits for the rest of its image."""
    done = finished(["kybernate", "status", id, "--json"])
    found = json.loads(done.stdout) if done.returncode == 0 else []
    for one in found if isinstance(found, list) else [found]:
        if one.get("step") == "arrival" and one["done_bytes"] > 0:
            return one  # type: ignore[no-any-return]
    return {}


@contextmanager
def held_up(store: Store, name: str, id: str, log: Path) -> Iterator[subprocess.Popen[str]]:
    """Restore an image of which the last pack does not come; CRIU is done with all that it can do."""
    store.slowed.hold(store.last_pack())
    before = log.read_text()
    with subprocess.Popen(command(name, id, log), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as restore:
        try:
            status = eventually(lambda: waiting(id), seconds=60)
            assert 0 < status["done_bytes"] < status["total_bytes"]
            assert log.read_text() == before, "it runs without all of its memory"
            yield restore
        finally:
            store.slowed.release()


def programs() -> list[str]:
    return [one.info["name"] for one in psutil.process_iter(["name"]) if "computes" in (one.info["name"] or "")]


def assert_nothing_is_left(gpus: Gpus, id: str, log: Path, before: str) -> None:
    assert log.read_text() == before, "it has run"
    assert "no container has the id" in refused("kybernate", "status", id)
    eventually(lambda: gpus.used() == [0, 0])
    eventually(lambda: not MEMORY.exists())
    assert not programs()
