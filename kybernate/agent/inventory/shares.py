"""How several proxies share what one container may have in flight. Without I/O.

Each holder reports what it wants and what it keeps to. A share is lowered by a message to its holder, and is given to
another one only once the holder has reported that it has read that, and what it still keeps: so all shares together
are never more than the limit. A share that is not asked for again ends by itself, which is how those of a proxy that
was killed end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

from kybernate.agent.inventory.activity import LASTS_SECONDS, MOST_SECONDS
from kybernate.node.failure import Exhausted

MOST_HOLDERS: Final = 256  # of one container
MOST_CONTAINERS: Final = 4096  # that shares are of
SETTLE_SECONDS: Final = 3.0  # after the agent's start, in which holders say what they have


@dataclass
class Holding:
    """What one holder wants of a container, may have, and may still keep; all are requests at one time.

    `number` rises with each change of `granted`.
    """

    limit: int
    until: float
    wanted: int = 0
    granted: int = 0
    kept: int = 0
    number: int = 0
    waits_since: float = inf  # for a share at all

    @property
    def charged(self) -> int:
        """Return what no other holder can have: its share, or what it may still keep of a larger one."""
        return max(self.granted, self.kept)


def divided(wanted: Mapping[str, int], limit: int) -> dict[str, int]:
    """Return the share of each holder, in the order of precedence.

    All grow evenly up to what they want. What is left is spread evenly over those that want anything, so that a holder
    need not ask for each request.
    """
    shares = dict.fromkeys(wanted, 0)
    left = limit
    for wish in (wanted, dict.fromkeys((name for name, count in wanted.items() if count), limit)):
        hungry = [name for name in wanted if shares[name] < wish.get(name, 0)]
        while left and hungry:
            step = max(1, min(left // len(hungry), min(wish[name] - shares[name] for name in hungry)))
            for name in hungry[: left // step]:
                shares[name] += step
                left -= step
            hungry = [name for name in hungry if shares[name] < wish[name]]
    return shares


class Shares:
    """The holders of each container. `changed` gets subject, holder and share where that is another one than before."""

    def __init__(self, changed: Callable[[str, str, Holding], object], now: Callable[[], float]) -> None:
        self._changed, self._now = changed, now
        self._known: dict[str, dict[str, Holding]] = {}
        self._settled_at = now() + SETTLE_SECONDS

    def ask(
        self, subject: str, holder: str, *, limit: int, wanted: int, held: int, seconds: float, seen: int = 0
    ) -> Holding:
        """Take the report of a holder, and return its share. Raises Exhausted where there are too many.

        `seen` is the number of the share that it had read when it said what it holds. Where the share of another
        holder changes by that, `changed` gets it.
        """
        now, known = self._now(), self._known.get(subject, {})
        if holder not in known and (len(known) >= MOST_HOLDERS or len(self._known) >= MOST_CONTAINERS):
            raise Exhausted(f"{len(known)} programs already share {subject}", state="nothing was granted")
        one = self._known.setdefault(subject, {}).setdefault(holder, Holding(limit, now))
        one.limit, one.wanted = limit, min(wanted, limit)
        one.kept = min(held if seen == one.number else max(held, one.kept), limit)
        one.until = now + min(seconds or LASTS_SECONDS, MOST_SECONDS)
        self._divide(subject, but=holder)
        return one

    def holders(self, subject: str) -> int:
        """Return how many there are, those included that want nothing at present."""
        return len(self._known.get(subject, {}))

    def expire(self) -> None:
        """Forget what has ended, and grant what is free by that."""
        now = self._now()
        for subject, known in list(self._known.items()):
            for name in [name for name, one in known.items() if one.until <= now]:
                del known[name]
            if known:
                self._divide(subject)
            else:
                del self._known[subject]

    def _divide(self, subject: str, but: str = "") -> None:
        known, now = self._known[subject], self._now()
        limit = min(one.limit for one in known.values())
        for one in known.values():
            starved = one.wanted > 0 and one.granted == 0
            one.waits_since = min(one.waits_since, now) if starved else inf
        order = sorted(known, key=lambda name: known[name].waits_since)  # the one that has waited longest comes first
        target = divided({name: known[name].wanted for name in order}, limit)
        before = {name: one.granted for name, one in known.items()}
        for name, one in known.items():
            one.granted = min(one.granted, target[name])
        for name in order:
            one = known[name]
            free = limit - sum(other.charged for other in known.values() if other is not one)
            most = one.kept if now < self._settled_at else free
            one.granted = max(one.granted, min(target[name], free, most))
            one.kept = max(one.kept, one.granted)  # until it says otherwise
        for name, one in known.items():
            if one.granted != before[name]:
                one.number += 1
                if name != but:
                    self._changed(subject, name, one)
