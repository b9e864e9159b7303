"""Checkpoint images as a store takes them, and as it gives them back."""

from __future__ import annotations

import asyncio
import shutil
from datetime import datetime
from pathlib import Path

from kybernate.store import source, writer
from kybernate.store.chunkstore import ChunkStore
from kybernate.store.format.recipe import Recipe
from kybernate.store.in_thread import in_thread
from kybernate.store.reader import fetch
from kybernate.store.sink import DirectorySink
from kybernate.store.tiers.directory import ARRIVING
from kybernate.store.transfer import Transfer
from kybernate_shim.checkpoint.image.manifest import decode
from kybernate_shim.checkpoint.image.store import read_image, require_space
from kybernate_shim.linux.private_files import make_directory


async def put(store: ChunkStore, directory: Path, transfer: Transfer) -> Recipe:
    """Store the image in a directory. Raises CheckpointNotFound, CheckpointInvalid, and what `writer.store` raises."""
    image = await asyncio.to_thread(read_image, directory)
    return await store_files(store, directory, image.content, directory.name, transfer)


async def store_files(store: ChunkStore, directory: Path, content: bytes, name: str, transfer: Transfer) -> Recipe:
    """Store the files in a directory by the name `name`; `content` is their manifest. Raises as `writer.store`."""
    manifest = decode(content)
    files = source.files_of(directory, manifest)
    created = datetime.fromisoformat(manifest.time).timestamp()
    image = writer.ImageSource(manifest.id, manifest.source.namespace, name, created, content, files)
    try:
        return await writer.store(store, image, transfer)
    finally:
        for file in files:
            file.close()


async def get(store: ChunkStore, recipe: Recipe, directory: Path, transfer: Transfer, *, durable: bool = True) -> Path:
    """Bring an image back as `directory`, which must not exist; it appears when it is complete.

    Raises FileExistsError, TierFull, and what `fetch` raises; nothing is left then.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} exists")
    arriving = directory.with_name(f"{ARRIVING}{directory.name}")
    make_directory(directory.parent)
    shutil.rmtree(arriving, ignore_errors=True)
    make_directory(arriving)
    try:
        needed = sum(size for file in recipe.files for size, id in file.pieces if id)  # the others are holes
        require_space(arriving, needed, what="image")
        sink = DirectorySink(arriving, {file.name: file.size for file in recipe.files})
        try:
            await fetch(store, recipe, sink, transfer)
            await in_thread(sink.finish, recipe.manifest, durable=durable)
        finally:
            sink.close()
        await asyncio.to_thread(read_image, arriving)  # its manifest, names and sizes, as a restore will read them
        arriving.rename(directory)
    except BaseException:
        shutil.rmtree(arriving, ignore_errors=True)
        raise
    return directory
