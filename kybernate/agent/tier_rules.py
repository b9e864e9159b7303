"""The policy's rules, from the settings of the tiers."""

from __future__ import annotations

from datetime import UTC, tzinfo
from pathlib import Path
from zoneinfo import ZoneInfo

from kybernate.agent.tier_settings import Policy, Tiers, WorkloadRule
from kybernate.store.policy.model import DISK, OBJECT, RAM, Rules, TierRules, WorkloadRules

LOCAL_TIME = Path("/etc/localtime")


def rules_of(settings: Tiers) -> Rules:
    """Return the rules that the settings mean. The node's time zone is read, where they name none."""
    policy = settings.policy
    default = _default(policy)
    return Rules(
        tiers={
            name: TierRules(tier.high, tier.low)
            for name, tier in ((RAM, settings.ram), (DISK, settings.disk), (OBJECT, settings.object))
        },
        default=default,
        workloads=tuple((rule.pattern, _differing(default, rule)) for rule in policy.workloads),
        persist_after=policy.persist_after,
        half_life=policy.half_life,
        prefetch_margin=policy.prefetch_margin,
        prefetch_hold=policy.prefetch_hold,
        park_high=policy.park_high,
        park_low=policy.park_low,
        zone=zone_of(policy.time_zone),
    )


def zone_of(name: str) -> tzinfo:
    """Return a time zone by its name, which the settings have checked; for "" the node's, or UTC where it has none."""
    if name:
        return ZoneInfo(name)
    try:
        with LOCAL_TIME.open("rb") as file:
            return ZoneInfo.from_file(file, key=_key())
    except (OSError, ValueError):
        return UTC


def _key() -> str:
    """Return the name of the node's zone, as far as a link says it."""
    return str(LOCAL_TIME.resolve()).partition("/zoneinfo/")[2] or "local"


def _default(policy: Policy) -> WorkloadRules:
    return WorkloadRules(
        ttl=policy.ttl,
        keep_last=policy.keep_last,
        minimum_copies=policy.minimum_copies,
        park_after=policy.park_after,
        prefetch=policy.prefetch,
    )


def _differing(default: WorkloadRules, rule: WorkloadRule) -> WorkloadRules:
    return WorkloadRules(
        ttl=default.ttl if rule.ttl is None else rule.ttl,
        keep_last=default.keep_last if rule.keep_last is None else rule.keep_last,
        minimum_copies=default.minimum_copies if rule.minimum_copies is None else rule.minimum_copies,
        park_after=default.park_after if rule.park_after is None else rule.park_after,
        prefetch=default.prefetch if rule.prefetch is None else rule.prefetch,
        pinned=rule.pinned,
    )
