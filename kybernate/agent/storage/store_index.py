"""Takes over into the registry which images the object store has, whichever node has put them there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kybernate.agent.storage.node_tiers import OBJECT
from kybernate.agent.storage.replicas import Replicas
from kybernate.node.failure import NoImage
from kybernate.registry.model import ImageRow
from kybernate.store.errors import StoreInvalid
from kybernate.store.tiers.tier import Ref
from kybernate_shim.checkpoint.image.manifest import ManifestInvalid

if TYPE_CHECKING:  # libraries of the extra `store`
    from kybernate.store.tiers.object import ObjectTier

PARALLEL = 8  # recipes that are read at the same time


@dataclass(frozen=True)
class Indexed:
    """What has changed: images that are registered now, places that are not any more, and what cannot be read."""

    added: Sequence[ImageRow] = ()
    removed: Sequence[str] = ()
    unreadable: Mapping[str, str] = field(default_factory=dict)


async def index_store(tier: ObjectTier, replicas: Replicas) -> Indexed:
    """Bring what the registry says of the object store up to date; recipes that it knows are not read.

    Raises StoreUnreachable and StoreDenied, and Failure where the registry does not answer.
    """
    # Before the list: what was registered then is in it, or was removed from the store.
    known = await asyncio.to_thread(replicas.places_below, tier.url)
    listed = await tier.listed()
    unreadable: dict[str, str] = {}
    read = known - await asyncio.to_thread(replicas.without_origin)
    new = [(place, ref) for place, ref in listed.items() if place not in read]
    rows: list[ImageRow] = []
    for begin in range(0, len(new), PARALLEL):
        some = new[begin : begin + PARALLEL]
        found = await asyncio.gather(*(_read(tier, replicas, place, ref, unreadable) for place, ref in some))
        rows += [row for row in found if row is not None]
    rows.sort(key=lambda row: str(row.created))  # generations count in the order of time
    added = [await asyncio.to_thread(replicas.add, row) for row in rows]
    removed = sorted(known - listed.keys())
    for place in removed:
        await asyncio.to_thread(replicas.gone_from, place)
    return Indexed(added, removed, unreadable)


async def _read(
    tier: ObjectTier, replicas: Replicas, place: str, ref: Ref, unreadable: dict[str, str]
) -> ImageRow | None:
    """Return the row of an image of the store, None where it is gone or cannot be read."""
    try:
        source = await tier.open(ref)
        held = await tier.find(ref)
        return replicas.row_of_stored(OBJECT, held, source.manifest)
    except NoImage:
        return None  # removed since it was listed
    except (StoreInvalid, ManifestInvalid, RecursionError) as error:
        unreadable[place] = str(error)
        return None
