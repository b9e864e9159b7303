"""What a service lacks, found out by trying it: objects below `probe/` are written, listed, read and deleted."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

from kybernate.store.errors import StoreDenied
from kybernate.store.objects import Objects

PREFIX = "probe"
CLOCK_SECONDS = 300.0  # services refuse requests from 900 on
CONTENT = b"kybernate"


async def probe(objects: Objects, clock: Callable[[], float] = time.time) -> list[str]:
    """Return what is to be known of a service, a sentence each; none where it has all that a store can use.

    Raises StoreUnreachable, StoreInconsistent, and StoreDenied where nothing may be read either.
    """
    place = f"{PREFIX}/{uuid.uuid4()}"
    names = [f"{place}/{number}" for number in range(2)]
    try:
        return await _tried(objects, place, names, clock)
    except StoreDenied as error:
        async for _ in objects.list(PREFIX):  # raises where that is refused as well
            break
        return [f"these credentials may not write or delete: {error}"]


async def _tried(objects: Objects, place: str, names: list[str], clock: Callable[[], float]) -> list[str]:
    said = []
    for name in names:
        await objects.create(name, CONTENT)
    if await objects.create(names[0], CONTENT):
        said.append(
            "it does not support conditional writes: of two parallel `kybernate store init`, the later one wins"
        )
    one = await objects.head(names[0])
    if one.version:
        said.append(
            "the bucket keeps versions: what `kybernate store gc` deletes takes room until a lifecycle rule of the "
            "bucket removes noncurrent versions and delete markers"
        )
    if abs(behind := clock() - one.modified) > CLOCK_SECONDS:
        said.append(f"its clock and this node's differ by {behind:.0f} s; from 900 on, requests are refused")
    if await objects.get_range(names[0], 4, 3) != CONTENT[4:7] or not objects.ranged:
        said.append("it answers requests for parts of objects with whole ones: each read brings whole packs")
    if sorted([stored.name async for stored in objects.list(place)]) != names:
        said.append("its lists do not show immediately what was written: no collection is safe there")
    await objects.delete(names)
    if [stored.name async for stored in objects.list(place)]:
        said.append("its lists show what was deleted")
    return said + sorted(objects.lacks)
