"""The temperature of each image in each tier, for one decision; each use and forecast is read once."""

from __future__ import annotations

from collections import defaultdict

from kybernate.store.policy.forecast import Expected, expected_use
from kybernate.store.policy.model import TIERS, ImageState, Key
from kybernate.store.policy.plan import Plan
from kybernate.store.policy.temperature import expected_rate, rate, saved_seconds, temperature, uses_of


class Warmth:
    """Answers how warm an image is.

    The uses of a workload, and its forecast, count for its newest image that can be read: the next restore takes that.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._rates: dict[Key, float] = {}
        self._expected: dict[str, Expected | None] = {}
        self._newest: dict[str, ImageState] = {}
        uses: dict[str, set[float]] = defaultdict(set)
        for image in plan.state.images:
            if image.workload:
                uses[image.owner].update(image.restores)
                newest = self._newest.get(image.owner)
                if (newest is None or (newest.created, newest.id) < (image.created, image.id)) and any(
                    plan.state.readable(image)
                ):
                    self._newest[image.owner] = image
        self._uses = {owner: tuple({*found, *plan.state.uses.get(owner, ())}) for owner, found in uses.items()}

    def newest(self) -> list[ImageState]:
        """Return the image of each workload that a forecast is about."""
        return [self._plan.images[one.key] for one in self._newest.values() if one.key in self._plan.images]

    def expected(self, image: ImageState) -> Expected | None:
        """Return the use of an image that is expected now: within the time that a copy takes, or a little ago."""
        newest = self._newest.get(image.owner)
        if newest is None or newest.key != image.key or not self._plan.rules_of(image).prefetch:
            return None
        if image.owner not in self._expected:
            rules = self._plan.rules
            self._expected[image.owner] = expected_use(
                self._uses[image.owner],
                now=self._plan.now,
                zone=rules.zone,
                ahead=self._lead(image),
                behind=rules.prefetch_hold,
            )
        return self._expected[image.owner]

    def rate(self, image: ImageState) -> float:
        """Return its expected uses per second."""
        if image.key not in self._rates:
            rules = self._plan.rules
            newest = self._newest.get(image.owner)
            inherited = self._uses[image.owner] if newest and newest.key == image.key else ()
            counted = rate({*uses_of(image), *inherited}, self._plan.now, rules.half_life)
            hoped = expected_rate(self.expected(image), rules.prefetch_hold)
            self._rates[image.key] = max(counted, hoped)
        return self._rates[image.key]

    def of(self, image: ImageState, tier: str) -> float:
        """Return the temperature of an image in a tier, whether it has a replica there or would get one."""
        others = [other for other in self._plan.good(image) if other != tier]
        saved = saved_seconds(image.size_bytes, tier, others, self._plan.tiers)
        return temperature(self.rate(image), saved, image.size_bytes)

    def _lead(self, image: ImageState) -> float:
        """Return how long before the use a copy has to begin, in seconds."""
        state = self._plan.state
        sources = [tier for tier in state.readable(image) if tier != TIERS[0]] or [*state.readable(image)]
        return state.tiers[sources[0]].seconds(image.size_bytes) + self._plan.rules.prefetch_margin
