"""What to do now about images and suspended containers. A pure function of what there is, and of the rules.

What the decisions keep to:

- An image's last good replica stays. Only `ttl` and `keep_last`, which a user has set, end an image.
- Nothing that is pinned is evicted or deleted; nothing of an image that is being restored or copied.
- Actions of one decision do not rely on each other, so that each may fail.
- They lead to a state in which nothing is to be done: images leave a tier above its high watermark until it is below
  the low one, and are copied to it only where it stays below the high one afterwards.
"""

from __future__ import annotations

from kybernate.store.policy.copies import plan_persistence, plan_repairs
from kybernate.store.policy.model import Action, Rules, State
from kybernate.store.policy.parking import plan_parking
from kybernate.store.policy.plan import Plan
from kybernate.store.policy.pressure import plan_relief
from kybernate.store.policy.promotion import plan_prefetch, plan_promotion
from kybernate.store.policy.retention import plan_deletions
from kybernate.store.policy.warmth import Warmth


def decide(state: State, rules: Rules) -> tuple[Action, ...]:
    """Return what to do now; nothing once all of it has been done, until something changes or time passes.

    The order of actions is that of their urgency, except that copies have priorities. A copy that is being made
    (`ImageState.copying`) is not planned again.
    """
    plan = Plan(state, rules)
    plan_deletions(plan)
    plan_repairs(plan)
    plan_persistence(plan)
    warmth = Warmth(plan)
    plan_relief(plan, warmth)
    plan_prefetch(plan, warmth)
    plan_promotion(plan, warmth)
    plan_parking(plan)
    return tuple(plan.actions)
