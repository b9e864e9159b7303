"""The working state of one decision: what is there, as far as the actions that were planned so far have changed it.

An eviction or deletion counts as done when it is planned, so that no later one relies on the replica. A copy does not:
it may fail, so that until the next decision it only takes room. So all actions of one decision are safe in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kybernate.store.policy.model import (
    DURABLE,
    TIERS,
    Action,
    Copy,
    Copying,
    Delete,
    Evict,
    ImageState,
    Key,
    Priority,
    ReplicaState,
    Rules,
    State,
    TierState,
    WorkloadRules,
)


class Plan:
    """Actions, and what they leave."""

    def __init__(self, state: State, rules: Rules) -> None:
        self.state, self.rules = state, rules
        self.now = state.now
        self.tiers: dict[str, TierState] = dict(state.tiers)
        self.images: dict[Key, ImageState] = {image.key: image for image in state.images}
        self.actions: list[Action] = []
        self._before = dict(self.images)
        self._inside = {tier: [key for key, one in self.images.items() if tier in one.replicas] for tier in TIERS}
        self._arriving = dict.fromkeys(TIERS, 0)  # bytes of copies that were planned or are being made
        for image in state.images:
            for copying in image.copying:
                self._take(copying.target, image.size_bytes)

    # ---- questions

    def rules_of(self, image: ImageState) -> WorkloadRules:
        return self.rules.of(image.owner)

    def is_pinned(self, image: ImageState) -> bool:
        return image.pinned or self.rules_of(image).pinned

    def is_free(self, image: ImageState) -> bool:
        """Return whether replicas of it may go: it is not pinned, and no restore and no copy reads or writes it."""
        return not (self.is_pinned(image) or image.wanted_by or image.copying)

    def good(self, image: ImageState) -> list[str]:
        return list(self.state.good(image))

    def required(self, image: ImageState) -> int:
        """Return how many replicas outside of memory it must have, as far as there are tiers for them."""
        there = sum(self.state.healthy(tier) for tier in DURABLE)
        return min(self.rules_of(image).minimum_copies, there)

    def may_evict(self, image: ImageState, tier: str, *, after: str = "") -> bool:
        """Return whether enough good replicas are left without that in `tier`; `after` a copy to that tier is done."""
        if not (tier in image.replicas and self.state.healthy(tier)):
            return False
        left = {*self.good(image), *([after] if after else [])} - {tier}
        return bool(left) and (tier not in DURABLE or len(left & DURABLE) >= self.required(image))

    def has(self, image: ImageState, tier: str) -> bool:
        """Return whether a tier has a replica, gets one, or had one when the decision began: it may still be there."""
        return tier in self._before[image.key].replicas or any(one.target == tier for one in image.copying)

    def above(self, tier: str, share: float, extra: float = 0) -> float:
        """Return how many bytes a tier has above a share, with `extra` and all that is on its way there."""
        return self.tiers[tier].above(share) + self._arriving[tier] + extra

    def has_room(self, tier: str, size: int, share: float) -> bool:
        return self.state.healthy(tier) and self.above(tier, share, size) <= 0

    def lower_with_room(self, image: ImageState, tier: str) -> str | None:
        """Return the next slower tier that an image can be copied to, None where there is none."""
        for target in TIERS[TIERS.index(tier) + 1 :]:
            if not self.has(image, target) and self.has_room(target, image.size_bytes, self.rules.tier(target).high):
                return target
        return None

    def replicas_in(self, tier: str) -> Iterator[tuple[ImageState, ReplicaState]]:
        """Yield the images in a tier; few are in memory, and this is asked for each that may come there."""
        for key in self._inside[tier]:
            if (image := self.images.get(key)) and tier in image.replicas:
                yield image, image.replicas[tier]

    # ---- actions

    def copy(self, image: ImageState, target: str, priority: Priority, reason: str) -> None:
        """Plan a copy from the fastest tier that has one. There must be one."""
        source = (self.good(image) or list(self.state.readable(image)))[0]
        self.actions.append(Copy(image.key, source, target, priority, reason))
        self.reserve(target, image.size_bytes)
        copying = (*image.copying, Copying(source, target))
        self.images[image.key] = replace(image, copying=copying)

    def evict(self, image: ImageState, tier: str, reason: str) -> None:
        self.actions.append(Evict(image.key, tier, reason))
        self._free(tier, image.replicas[tier].bytes)
        left = {name: replica for name, replica in image.replicas.items() if name != tier}
        self.images[image.key] = replace(image, replicas=left)

    def delete(self, image: ImageState, reason: str) -> None:
        self.actions.append(Delete(image.key, reason))
        for tier, replica in image.replicas.items():
            self._free(tier, replica.bytes)
        del self.images[image.key]

    def reserve(self, tier: str, size: int) -> None:
        """Count room as taken by what is to come."""
        self._take(tier, size)

    def _take(self, tier: str, size: int) -> None:
        if tier in self._arriving:
            self._arriving[tier] += size

    def _free(self, tier: str, size: int) -> None:
        if tier in self.tiers:
            self.tiers[tier] = without(self.tiers[tier], size)


def without(tier: TierState, size: int) -> TierState:
    """Return a tier with so many bytes less in it; negative for more."""
    return replace(tier, free_bytes=max(0, tier.free_bytes + size), used_bytes=max(0, tier.used_bytes - size))
