"""What a store holds, and what sharing saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kybernate.store.chunkstore import ChunkStore
from kybernate.store.reach import recipes


@dataclass
class Stats:
    """`image_bytes` are those of the images as they are restored, `stored_bytes` those that the packs take."""

    images: int = 0
    image_bytes: int = 0
    packs: int = 0
    stored_bytes: int = 0
    chunks: int = 0


async def stats(store: ChunkStore, *, report: Callable[[int, int], object] = lambda done, total: None) -> Stats:
    """Count; `report` gets images done and in total. Raises StoreInvalid where a recipe cannot be read."""
    found = Stats()
    async for pack in store.objects.list("packs"):
        found.packs, found.stored_bytes = found.packs + 1, found.stored_bytes + pack.size
    async for recipe in recipes(store, report=report):
        found.images, found.image_bytes = found.images + 1, found.image_bytes + recipe.size
    await store.refresh()
    found.chunks = store.index.count()
    return found
