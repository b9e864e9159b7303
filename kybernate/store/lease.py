"""Who writes to a store now: an object of its own for each writer, renewed while it works, and how a dead one is ended.

A collection deletes nothing that a living writer may rely on (gc.py). A writer whose lease was not renewed for a while,
by the service's clock, is ended: a tombstone is written, then its draft of a recipe is deleted. A writer looks for the
tombstone after it has written the draft, and publishes by having the service copy the draft. So one that was ended
cannot publish, however long it was away, and whatever the clocks say: a wrong clock costs an upload, and no image.
"""

from __future__ import annotations

import asyncio
import json
import socket
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from kybernate.node.failure import Failure
from kybernate.store.errors import ObjectMissing, StoreInvalid
from kybernate.store.format.documents import parse
from kybernate.store.objects import Objects, Stored

PREFIX = "writers"
DRAFTS = "drafts"
ENDED = "ended"
LASTS_SECONDS = 900.0
RENEW_SECONDS = 120.0
MOST_BYTES = 64 << 10  # of a lease
TOMBSTONE_SECONDS = 90 * 86400.0  # a writer that was away for longer is dead


@dataclass
class Lease:
    """A writer's lease. `began` is the service's time, in seconds since 1970."""

    objects: Objects
    id: str
    began: float = 0.0

    @property
    def name(self) -> str:
        return f"{PREFIX}/{self.id}"

    @property
    def draft(self) -> str:
        """The object in which the writer's recipe waits for being published."""
        return f"{DRAFTS}/{self.id}"

    async def renew(self) -> None:
        # The begin is in the content: the service's time of the object moves with each renewal.
        await self.objects.put(self.name, json.dumps({"host": socket.gethostname(), "began": self.began}).encode())

    async def require(self) -> None:
        """Raise Failure where a collection has ended this writer."""
        try:
            await self.objects.head(f"{ENDED}/{self.id}")
        except ObjectMissing:
            return
        raise self.lost()

    def lost(self) -> Failure:
        return Failure(
            "the writer was away for longer than its lease lasts; nothing was published",
            advice="try again: what is still there is not sent again",
        )


@asynccontextmanager
async def leased(objects: Objects) -> AsyncIterator[Lease]:
    """Hold a lease for the block."""
    lease = Lease(objects, str(uuid.uuid4()))
    await lease.renew()
    lease.began = await _written(lease)
    await lease.renew()
    renewing = asyncio.create_task(_keep(lease))
    try:
        yield lease
    finally:
        renewing.cancel()
        await asyncio.wait({renewing})
        with suppress(Failure):  # it runs out by itself, and the first error counts
            # The draft first, and each in a request of its own: a lease that is gone means that nothing follows.
            await objects.delete([lease.draft])
            await objects.delete([lease.name])


async def _written(lease: Lease) -> float:
    try:
        return (await lease.objects.head(lease.name)).modified
    except ObjectMissing as error:
        raise lease.lost() from error


async def _keep(lease: Lease) -> None:
    while True:
        await asyncio.sleep(RENEW_SECONDS)
        try:
            await lease.renew()
        except Exception:  # noqa: BLE001  # the writer's own calls fail as well, and say why
            continue


async def present(objects: Objects) -> frozenset[str]:
    """Return the ids of all leases, living or not."""
    return frozenset([_id(stored) async for stored in objects.list(PREFIX)])


async def living(objects: Objects, now: float, *, end: bool = True) -> Mapping[str, float]:
    """Return the writers that may still publish, with when each began; with `end`, all others are ended.

    Without `end`, those that would be ended are left out all the same.
    """
    drafts = {_id(stored) async for stored in objects.list(DRAFTS)}  # before the leases, which are there for longer
    # Twice: a lease that a list leaves out would be a writer whose packs are deleted under it.
    leases = {_id(stored): stored for _ in range(2) async for stored in objects.list(PREFIX)}
    ended = {_id(stored): stored async for stored in objects.list(ENDED)}
    alive = {id for id, one in leases.items() if id not in ended and now - one.modified <= LASTS_SECONDS}
    if end:
        for id in sorted((drafts | leases.keys()) - alive):
            await _end(objects, id)
        await objects.delete([one.name for one in ended.values() if now - one.modified > TOMBSTONE_SECONDS])
    return {id: await _began(objects, leases[id]) for id in sorted(alive)}


async def _end(objects: Objects, id: str) -> None:
    """See to it that a writer publishes nothing from now on. Each step is complete before the next."""
    await objects.put(f"{ENDED}/{id}", b"")
    await objects.delete([f"{DRAFTS}/{id}"])
    await objects.delete([f"{PREFIX}/{id}"])


async def _began(objects: Objects, stored: Stored) -> float:
    """Return when a lease began; one that is just being made began no earlier than it was written."""
    try:
        document = parse(stored.name, await objects.get(stored.name, most=MOST_BYTES))
        return float(document["began"]) or stored.modified
    except (ObjectMissing, StoreInvalid, ValueError, KeyError, TypeError, OverflowError):
        return stored.modified - LASTS_SECONDS


def _id(stored: Stored) -> str:
    return stored.name.rpartition("/")[2]
