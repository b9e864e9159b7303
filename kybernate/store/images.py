"""Checkpoint images as a store takes them, and as it gives them back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from kybernate.node.failure import Failure, NoImage, Refused
from kybernate.store import source, writer
from kybernate.store.chunkstore import ChunkStore
from kybernate.store.errors import ChunkDamaged, StoreInvalid, first_of
from kybernate.store.format.recipe import Recipe
from kybernate.store.order import ordered
from kybernate.store.reader import Sink, fetch
from kybernate.store.same_image import is_same_image
from kybernate.store.tiers.directory import DirectoryTier
from kybernate.store.tiers.tier import Have, Ref
from kybernate.store.transfer import Transfer
from kybernate_shim.checkpoint.image.manifest import decode
from kybernate_shim.checkpoint.image.store import read_image


async def put(store: ChunkStore, directory: Path, transfer: Transfer) -> Recipe:
    """Store the image in a directory. Raises CheckpointNotFound, CheckpointInvalid, and what `writer.store` raises.

    The name of one that the store has already becomes that of the directory. Raises Failure where the store has it
    encrypted, or for another namespace.
    """
    image = await asyncio.to_thread(read_image, directory)
    source = image.manifest.source
    try:
        known = await store.recipe(source.namespace, image.manifest.id)
    except (NoImage, StoreInvalid):
        pass  # what cannot be read is replaced
    else:
        require_same(known, image.content)
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


def require_same(known: Recipe, manifest: bytes) -> None:
    """Raise Refused where the store has another image of that id: it would be lost."""
    if not is_same_image(known.manifest, manifest):
        raise Refused(
            f"the store has image {known.id} with another manifest, under the name {known.name}: one of them is"
            " encrypted, or was changed",
            state="both are as they were",
            advice="first remove the one in the store, or keep this one where it is",
        )


@dataclass(frozen=True)
class StoredImage:
    """An image of a store as a source for a tier. `ref` says where the tier has it."""

    store: ChunkStore
    recipe: Recipe
    ref: Ref
    directory: None = None

    @property
    def manifest(self) -> bytes:
        return self.recipe.manifest

    async def pour(self, sink: Sink, transfer: Transfer, have: Have) -> None:
        await fetch(self.store, ordered(self.recipe), sink, transfer, have=have.has)

    async def close(self) -> None:
        return None


async def get(store: ChunkStore, recipe: Recipe, directory: Path, transfer: Transfer) -> Path:
    """Bring an image back as `directory`, which must not exist; it appears when it is complete.

    Raises FileExistsError, and what DirectoryTier.receive raises. What has arrived stays for the next attempt, unless
    the store's bytes are damaged.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} exists")
    source = StoredImage(store, recipe, Ref("", directory.name, recipe.id))
    tier = DirectoryTier("disk", 2, directory.parent)
    try:
        await tier.receive(source, transfer)
    except (Failure, ExceptionGroup) as error:
        if isinstance(first_of(error), ChunkDamaged):
            await tier.discard(source.ref)
        raise
    return directory
