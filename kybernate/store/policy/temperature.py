"""What it is worth to keep an image in a tier: seconds of waiting that are saved, per byte and second that it is kept.

    temperature = rate x saved / bytes
    rate        = min(weight / (exposure + PRIOR), 1 / idle)                         uses per second
    weight      = sum of 2^-(age/half_life) over the uses                            uses
    exposure    = half_life/ln 2 x (1 - 2^-(observed/half_life))                     seconds
    saved       = restore time from the next slower tier - restore time from this    seconds for each use

`age` is the time since a use, `observed` since the first one that is remembered, `idle` since the last. The rate is
what was counted divided by how long was looked, both decayed: for times that are short against the half-life it is
uses divided by age, as in hyperbolic caching; for long times it is the combined recency and frequency of LRFU. The
prior, a minute without a use, keeps what was used once, a moment ago, from passing for something that is used all the
time. What has not been used for longer than usual is given up, as by LRU: its rate is one use in the time that it was
idle, at most. Cost and size are those of GreedyDual-Size-Frequency, with the seconds of a restore as cost. Its
inflation term is not needed, because the rate decays by itself.

A use that is expected (see `forecast`) counts as a rate of its own: its probability, once in the time that it is held
for.

Sources: Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy" (1998); Lee et
al., "LRFU" (2001); Blankstein et al., "Hyperbolic Caching" (2017).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from kybernate.store.policy.forecast import Expected
from kybernate.store.policy.model import TIERS, ImageState, TierState

PRIOR: Final = 60.0  # seconds


def weight(uses: Iterable[float], now: float, half_life: float) -> float:
    """Return the number of uses, each halved for every half-life of its age; uses in the future count as of now."""
    return sum(math.exp2(-max(0.0, now - use) / half_life) for use in uses)


def rate(uses: Collection[float], now: float, half_life: float) -> float:
    """Return how often it is likely to be used, in uses per second."""
    known = tuple(uses) or (now,)
    counted = weight(uses, now, half_life)
    return rate_of(counted, observed=now - min(known), idle=now - max(known), half_life=half_life)


def rate_of(weight: float, *, observed: float, idle: float, half_life: float) -> float:
    """Return the rate for a weight of uses, the first and last of which were `observed` and `idle` seconds ago."""
    exposure = half_life / math.log(2) * (1 - math.exp2(-max(0.0, observed) / half_life))
    return min(weight / (exposure + PRIOR), 1 / max(1.0, idle))


def uses_of(image: ImageState) -> tuple[float, ...]:
    """Return the times at which an image was made or used."""
    return tuple({image.created, *image.restores})


def saved_seconds(size: int, tier: str, others: Iterable[str], tiers: Mapping[str, TierState]) -> float:
    """Return how much longer a restore takes without the copy in `tier`: from the fastest of `others`.

    Where there is no other, it is the next slower tier that there is, because the image is copied there before.
    """
    here = tiers[tier].seconds(size)
    there = [tiers[other].seconds(size) for other in others if other in tiers]
    if not there:
        slower = TIERS[TIERS.index(tier) + 1 :]
        there = [tiers[other].seconds(size) for other in slower if other in tiers][:1]
    return max(0.0, min(there, default=here) - here)


def expected_rate(expected: Expected | None, hold: float) -> float:
    """Return the rate of a use that is expected within `hold` seconds, in uses per second."""
    return expected.share / max(1.0, hold) if expected else 0.0


def temperature(rate: float, saved: float, size: int) -> float:
    """Return the seconds of waiting that are saved for each byte and second."""
    return rate * saved / max(1, size)
