"""Which copy of an image a request is about, of those that its name means. Pure.

A request acts on the copy that was named. Where the name means several that it could act on, nothing is done, and the
answer lists their places, each of which is a name of one copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kybernate.agent.storage.node_tiers import OBJECT
from kybernate.node.failure import Failure, Missing, NoImage
from kybernate.node.naming import listed, the_only
from kybernate.registry.failures import IMAGE_NOT_REGISTERED_ADVICE
from kybernate.registry.model import ImageRow
from kybernate.store.tiers.tier import Ref


@dataclass(frozen=True)
class TierCopy:
    """A copy of an image. `ref` is what its tier knows it by; `tier` is "" for another node's, and for one outside.

    `is_here`: it lies in a directory of this node. `whole`: nothing wrong is known of it.
    """

    row: ImageRow
    ref: Ref
    tier: str
    place: str
    is_here: bool = False
    whole: bool = True

    @property
    def is_elsewhere(self) -> bool:
        """Whether it can be brought from another node or from the object store."""
        return not self.is_here and self.whole


def to_evict(name: str, tier: str, copies: Sequence[TierCopy]) -> Ref:
    """Return the copy in a tier that `name` means. Raises Missing, NoImage and Ambiguous."""
    _require_some(name, copies)
    there = [copy for copy in copies if copy.tier == tier]
    if not there:
        raise NoImage(
            f"no copy named {name!r} is in tier {tier}; the name means these:\n{_places(copies)}",
            state="nothing was removed",
            advice="name the tier of one of them, or a copy by its place",
        )
    return _only(name, there).ref


def to_copy(name: str, target: str, tiers: Sequence[str], copies: Sequence[TierCopy], *, demote: bool = False) -> Ref:
    """Return the image that is copied to `target`; `tiers` are this node's, the fastest first.

    With `demote`, it is the one that leaves the tiers that are faster. Copies of this node come before others.
    Raises Missing, Failure and Ambiguous.
    """
    _require_some(name, copies)
    here = [copy for copy in copies if copy.tier and copy.tier != OBJECT]
    faster = [copy for copy in here if tiers.index(copy.tier) < tiers.index(target)]
    if chosen := (faster if demote and faster else here):
        return _only(name, chosen).ref
    if away := [copy for copy in copies if copy.is_elsewhere]:
        return _only(name, away).ref
    raise Failure(
        f"{name!r} is in no tier of this node:\n{_places(copies)}",
        state="nothing was done",
        advice="`kybernate import` takes it over",
    )


def to_bring(name: str, copies: Sequence[TierCopy], *, stored: bool) -> TierCopy | None:
    """Return a copy of the image that other nodes or the object store have, with `stored` the object store alone.

    None where they have none. Raises Ambiguous.
    """
    away = [copy for copy in copies if copy.is_elsewhere and (copy.tier == OBJECT or not stored)]
    images = {copy.row.key: copy for copy in reversed(away)}  # whose copies may be called differently
    return _only(name, images.values()) if away else None


def _only(name: str, copies: Iterable[TierCopy]) -> TierCopy:
    """Return the only one; what lies in several tiers under one name counts once."""
    found: dict[tuple[Ref, str], TierCopy] = {}
    for copy in copies:
        found.setdefault((copy.ref, copy.row.key), copy)
    the_only(name, [copy.place for copy in found.values()])
    return next(iter(found.values()))


def _require_some(name: str, copies: Sequence[TierCopy]) -> None:
    if not copies:
        raise Missing(
            f"the registry has no image {name!r}", state="nothing was done", advice=IMAGE_NOT_REGISTERED_ADVICE
        )


def _places(copies: Iterable[TierCopy]) -> str:
    return listed([f"{copy.place} ({f'tier {copy.tier}' if copy.tier else 'in none of them'})" for copy in copies])
