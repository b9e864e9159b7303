"""Copies an image to a tier from wherever it is whole, and removes copies, but never the last good one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kybernate.client.errors import AgentRefused, AgentUnreachable
from kybernate.node.failure import Failure, NoImage, Refused
from kybernate.node.verdict import signature_problem
from kybernate.store.errors import (
    ChunkDamaged,
    ImageDamaged,
    ObjectMissing,
    StoreDenied,
    StoreInvalid,
    StoreUnreachable,
    first_of,
)
from kybernate.store.same_image import is_same_image
from kybernate.store.tiers.peer_connection import PeerFailed
from kybernate.store.tiers.tier import IMAGE_DIFFERS_ADVICE, Held, Ref, Tier
from kybernate.store.transfer import Transfer
from kybernate_shim.checkpoint.image.manifest import ManifestInvalid, decode
from kybernate_shim.checkpoint.image.store import Image
from kybernate_shim.config import Config

OF_SOURCES: Final = (NoImage, ImageDamaged, ChunkDamaged, StoreInvalid, ObjectMissing, OSError)
OF_PEERS: Final = (PeerFailed, AgentUnreachable, AgentRefused)
OF_NETWORKS: Final = (StoreUnreachable, StoreDenied)
OF_COPIES: Final = (*OF_SOURCES, *OF_PEERS, *OF_NETWORKS)
REMOTE = 3  # the level from which on a tier is reached over a network


class ImageNowhere(Failure):
    """No tier has a good copy of the image that could be read now; the message says why, for each."""

    advice = "`kybernate images -o wide` lists its copies"


async def bring(
    ref: Ref, sources: Sequence[Tier], target: Tier, transfer: Transfer, *, remote_bytes_per_second: float = 0.0
) -> tuple[Held, str]:
    """Copy an image into `target` from the first of `sources` that gives it whole; return it and that tier's name.

    What one source gave is kept when the next one continues. `remote_bytes_per_second` limits what goes over a network,
    0 for no limit. Raises ImageNowhere, and what `target.receive` raises
    where the target is at fault.
    """
    reasons: list[str] = []
    for tier in sources:
        remote = max(tier.level, target.level) >= REMOTE
        transfer.bytes_per_second = remote_bytes_per_second if remote else 0.0
        try:
            return await _receive(ref, tier, target, transfer), tier.name
        except (Failure, OSError, ExceptionGroup) as error:
            first = first_of(error)
            if not _is_the_sources(first, target):
                raise first from None
            reasons.append(f"{tier.name}: {first}")
    raise ImageNowhere(
        f"{ref} cannot be read from any tier:\n" + "\n".join(f"  {one}" for one in reasons or ["there is no copy"]),
        state="what has arrived is kept for the next attempt",
    )


async def evict(ref: Ref, tier: Tier, others: Sequence[Tier]) -> str:
    """Remove an image from a tier, once another one has a whole copy; return that tier's name. Raises Refused.

    The other copy is of the same image, and is read and compared, but for one in an object store, whose chunks must all
    be there. Memory does not count for a tier that survives a power failure.
    """
    reasons: list[str] = []
    manifest = await _manifest(ref, tier)
    for other in (other for other in others if other.durable or not tier.durable):
        try:
            _require_same(ref, manifest, await _manifest(ref, other))
            await other.verify(ref)
        except (Failure, OSError) as error:
            reasons.append(f"{other.name}: {error}")
            continue
        await tier.remove(ref)
        return other.name
    raise Refused(
        f"{ref} stays in tier {tier.name}: no other tier has a good copy" + "".join(f"\n  {one}" for one in reasons),
        state="nothing was removed",
        advice="copy it to another tier first, or delete the image",
    )


async def _receive(ref: Ref, tier: Tier, target: Tier, transfer: Transfer) -> Held:
    source = await tier.open(ref)
    try:
        return await target.receive(source, transfer)
    finally:
        await source.close()


def _require_same(ref: Ref, manifest: bytes, other: bytes) -> None:
    """Raise Refused unless a manifest of another tier may replace the one here: signed by a key that is valid here."""
    if manifest == other:
        return
    try:
        same = is_same_image(manifest, other)
    except ManifestInvalid as error:
        raise Refused(
            f"it has the image {ref.id} with a manifest that cannot be read: {error}", advice=IMAGE_DIFFERS_ADVICE
        ) from error
    if not same:
        raise Refused(
            f"it has the image {ref.id} with another manifest: encrypted, or of another namespace",
            advice=IMAGE_DIFFERS_ADVICE,
        )
    if reason := signature_problem(Image(Path(ref.path), decode(other), content=other), Config.load()):
        raise Refused(f"it has the image {ref.id} with another manifest: {reason}", advice=IMAGE_DIFFERS_ADVICE)


async def _manifest(ref: Ref, tier: Tier) -> bytes:
    source = await tier.open(ref)
    try:
        return source.manifest
    finally:
        await source.close()


def _is_the_sources(error: Exception, target: Tier) -> bool:
    """Return whether another source may do better. An error of a network is that of the side that has one."""
    return isinstance(error, (*OF_SOURCES, *OF_PEERS)) or (isinstance(error, OF_NETWORKS) and target.level < REMOTE)
