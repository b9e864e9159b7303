"""What a store holds, and what sharing saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kybernate.store.chunkstore import ChunkStore
from kybernate.store.reach import recipes


@dataclass
class Stats:
    """`image_bytes` are those of the images as they are restored, `stored_bytes` those that the packs take.

    `broken` are objects that hold no recipe where one belongs, and why.
    """

    images: int = 0
    image_bytes: int = 0
    packs: int = 0
    stored_bytes: int = 0
    chunks: int = 0
    broken: dict[str, str] = field(default_factory=dict)


async def stats(store: ChunkStore, *, report: Callable[[int, int], object] = lambda done, total: None) -> Stats:
    """Count; `report` gets images done and in total."""
    found = Stats()
    async for pack in store.objects.list("packs"):
        found.packs, found.stored_bytes = found.packs + 1, found.stored_bytes + pack.size
    async for recipe in recipes(store, report=report, broken=found.broken.__setitem__):
        found.images, found.image_bytes = found.images + 1, found.image_bytes + recipe.size
    await store.refresh()
    found.chunks = store.index.count()
    return found
