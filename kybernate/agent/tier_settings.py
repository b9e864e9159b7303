"""The settings of the store's tiers, and of the policy that moves images between them: `[tiers]` of `agent.toml`."""

# ruff: noqa: RUF009  (settings are dataclass fields; their declarations only call dataclasses.field)
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from zoneinfo import ZoneInfo

from kybernate_shim.config.declaring import setting, table
from kybernate_shim.config.forms import BYTES, SECONDS, SHARE, YES_OR_NO, SettingForm

DAY: Final = 86400.0  # seconds


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError
    return value


def _time_zone(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    if value:
        try:
            ZoneInfo(value)
        except (KeyError, OSError) as error:  # not known, or a directory of zones
            raise ValueError from error
    return value


NUMBER: Final = SettingForm("a whole number, 0 or more", _number)
TIME_ZONE: Final = SettingForm('a name of the tz database, such as "Europe/Berlin", or "" for the node\'s', _time_zone)


@dataclass(frozen=True)
class WorkloadRule:
    """What differs for the workloads that match `pattern`; None stands for the policy's own value."""

    pattern: str
    ttl: float | None = None
    keep_last: int | None = None
    minimum_copies: int | None = None
    park_after: float | None = None
    prefetch: bool | None = None
    pinned: bool = False


RULE_FORMS: Final[Mapping[str, SettingForm]] = {
    "ttl": SECONDS,
    "keep_last": NUMBER,
    "minimum_copies": NUMBER,
    "park_after": SECONDS,
    "prefetch": YES_OR_NO,
    "pinned": YES_OR_NO,
}


def _workloads(value: object) -> tuple[WorkloadRule, ...]:
    if not isinstance(value, dict):
        raise ValueError
    return tuple(_workload(pattern, rule) for pattern, rule in value.items())


def _workload(pattern: str, rule: object) -> WorkloadRule:
    if not pattern or not isinstance(rule, dict) or not rule.keys() <= RULE_FORMS.keys():
        raise ValueError
    found: dict[str, Any] = {name: RULE_FORMS[name].parse(value) for name, value in rule.items()}
    return WorkloadRule(pattern, **found)


WORKLOADS: Final = SettingForm(
    'a table of rules by NAMESPACE/WORKLOAD, such as { "team-a/*" = { keep_last = 3 } }, each with some of '
    + ", ".join(f"`{name}`" for name in RULE_FORMS),
    _workloads,
)


@dataclass(frozen=True)
class Ram:
    """Tier 1: images in the node's memory, below `memory_root` of shim.toml."""

    quota: int = setting(0, BYTES, "that images may take of it", unset="no limit")
    high: float = setting(0.85, SHARE, "of the quota or the file system: above it, images are demoted")
    low: float = setting(
        0.7, SHARE, "of the same: demotion ends below it, and images that are used often come up to it"
    )
    read_bytes_per_second: int = setting(
        4 << 30, BYTES, "that a restore reads from it, until the speed has been measured", unset='`"4GiB"`'
    )


@dataclass(frozen=True)
class Disk:
    """Tier 2: images on the node's NVMe, below `checkpoint_root` of shim.toml."""

    quota: int = setting(0, BYTES, "that images may take of it", unset="no limit")
    high: float = setting(0.9, SHARE, "of the quota or the file system: above it, images are demoted")
    low: float = setting(0.8, SHARE, "of the same: demotion ends below it")
    read_bytes_per_second: int = setting(
        1 << 30, BYTES, "that a restore reads from it, until the speed has been measured", unset='`"1GiB"`'
    )


@dataclass(frozen=True)
class Object:
    """Tier 3: the store at `store.url`."""

    quota: int = setting(0, BYTES, "that this node's images may take of it", unset="no limit")
    high: float = setting(
        0.95, SHARE, "of the quota: above it, images are evicted of which the node has enough other copies"
    )
    low: float = setting(0.9, SHARE, "of the quota: eviction ends below it")
    read_bytes_per_second: int = setting(
        256 << 20, BYTES, "that a restore reads from it, until the speed has been measured", unset='`"256MiB"`'
    )


@dataclass(frozen=True)
class Policy:
    """When images are copied, evicted and deleted, and suspended containers parked."""

    enabled: bool = setting(True, YES_OR_NO, "whether images are moved by policy; false: only on request")
    interval: float = setting(10.0, SECONDS, "between two decisions, unless something has changed")
    minimum_copies: int = setting(
        1, NUMBER, "of an image outside of memory, as far as there are tiers; 0: memory alone will do"
    )
    persist_after: float = setting(60.0, SECONDS, "that an image may lie in memory before it is copied elsewhere")
    ttl: float = setting(0.0, SECONDS, "after which an image that was not used is deleted; 0: never")
    keep_last: int = setting(0, NUMBER, "images of a workload that are kept; older ones are deleted; 0: all are kept")
    park_after: float = setting(0.0, SECONDS, "after which a suspended container is parked; 0: never")
    park_high: float = setting(1.0, SHARE, "of the arena: above it, suspended containers are parked; 1: never")
    park_low: float = setting(0.8, SHARE, "of the arena: parking for room ends below it")
    half_life: float = setting(DAY, SECONDS, "in which a use counts half in an image's temperature; above 0")
    prefetch: bool = setting(True, YES_OR_NO, "whether an image is copied into memory before its usual time of use")
    prefetch_margin: float = setting(90.0, SECONDS, "between the expected end of that copy and the usual time")
    prefetch_hold: float = setting(1800.0, SECONDS, "that it stays in memory after the usual time without a use")
    time_zone: str = setting("", TIME_ZONE, "in which usual times are understood", unset="the node's")
    workloads: tuple[WorkloadRule, ...] = setting(
        (), WORKLOADS, "rules that differ; the first that matches applies; `*` stands for any text", unset="none"
    )


@dataclass(frozen=True)
class Tiers:
    """The rules by which images move between the tiers of this node."""

    ram: Ram = table(Ram)
    disk: Disk = table(Disk)
    object: Object = table(Object)
    policy: Policy = table(Policy)


def contradictions(found: Tiers) -> Iterator[str]:
    """Yield in words what cannot be meant together."""
    for name, tier in (("ram", found.ram), ("disk", found.disk), ("object", found.object)):
        if tier.low >= tier.high:
            yield f"tiers.{name}.low must be below tiers.{name}.high"
    if found.policy.park_low >= found.policy.park_high:
        yield "tiers.policy.park_low must be below tiers.policy.park_high"
    if found.policy.half_life <= 0:
        yield "tiers.policy.half_life must be above 0"
