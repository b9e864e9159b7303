"""The program in docs/store-format.md reads what the store has written."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from kybernate.store.keys import make_key
from kybernate.store.place import StorePlace, open_store
from kybernate.store.transfer import Transfer
from kybernate.store.writer import ImageSource, store
from tests.documentation import block
from tests.unit.store.stepped import MemoryFile


def test_reader(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    contents = {"core-1.img": b"text " * 50_000, "pages-1.img": os.urandom(300_000) + bytes(100_000)}
    files = tuple(MemoryFile(name, content, chunk=65536) for name, content in contents.items())

    async def write() -> None:
        target = await open_store(StorePlace(f"file://{tmp_path}/store", tmp_path / "key")).open(create=True)
        await store(target, ImageSource("id-1", "team-a", "web", 1.0, b"manifest", files), Transfer())
        target.close()

    asyncio.run(write())
    program = block("docs/store-format.md", "reader").text
    arguments = [str(tmp_path / "store"), str(tmp_path / "key"), "team-a/id-1", str(tmp_path / "back")]
    subprocess.run([sys.executable, "-c", program, *arguments], check=True)
    found = {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()}
    assert found == {**contents, "kybernate-manifest.json": b"manifest"}
