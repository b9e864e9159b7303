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
    id = uuid.uuid4()
    names = [f"{PREFIX}/{id}-{number}" for number in range(2)]  # a folder of each probe's own would stay in a directory
    try:
        return await _tried(objects, names, clock)
    except StoreDenied as error:
        async for _ in objects.list(PREFIX):  # raises where that is refused as well
            break
        return [f"these credentials may not write or delete: {error}"]


async def _tried(objects: Objects, names: list[str], clock: Callable[[], float]) -> list[str]:
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
    if (until := await objects.locked_until(names[0])) is not None:
        days = f"{(until - one.modified) / 86400:.3g}"
        said.append(
            f"the bucket has an object lock: what is written there stays for {days} day{'s' * (days != '1')}, "
            "also what `kybernate store gc` deletes"
        )
    if abs(behind := clock() - one.modified) > CLOCK_SECONDS:
        said.append(f"its clock and this node's differ by {behind:.0f} s; from 900 on, requests are refused")
    if await objects.get_range(names[0], 4, 3) != CONTENT[4:7] or not objects.ranged:
        said.append("it answers requests for parts of objects with whole ones: each read brings whole packs")
    if await _listed(objects, names) != names:
        said.append("its lists do not show immediately what was written: no collection is safe there")
    await objects.delete(names)
    if await _listed(objects, names):
        said.append("its lists show what was deleted")
    return said + sorted(objects.lacks)


async def _listed(objects: Objects, names: list[str]) -> list[str]:
    """Return which of the names a list has; other nodes may try the service as well."""
    return sorted([stored.name async for stored in objects.list(PREFIX) if stored.name in names])
