"""The policy's rules from the node's settings."""

from __future__ import annotations

import shutil
from dataclasses import fields, replace
from datetime import UTC
from pathlib import Path
from zoneinfo import TZPATH, ZoneInfo

import pytest

from kybernate.agent import tier_rules
from kybernate.agent.settings import Settings
from kybernate.agent.tier_rules import rules_of, zone_of
from kybernate.store.policy.model import Rules, TierRules


def test_defaults_of_settings_and_rules_are_the_same() -> None:
    found, rules = rules_of(Settings().tiers), Rules()
    for name in {one.name for one in fields(Rules)} - {"tiers", "zone"}:
        assert getattr(found, name) == getattr(rules, name), name


def test_settings_arrive_in_the_rules(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text(
        "[tiers.disk]\nhigh = 0.5\nlow = 0.4\n"
        '[tiers.policy]\nttl = 60\nminimum_copies = 2\ntime_zone = "Asia/Tokyo"\n'
        '[tiers.policy.workloads."a/*"]\nkeep_last = 3\npark_after = 5\nprefetch = false\n'
    )
    rules = rules_of(Settings.load(file).tiers)
    assert rules.tier("disk") == TierRules(0.5, 0.4)
    assert rules.zone == ZoneInfo("Asia/Tokyo")
    assert (rules.default.ttl, rules.default.minimum_copies) == (60, 2)
    assert rules.of("a/w") == replace(rules.default, keep_last=3, park_after=5, prefetch=False)
    assert rules.of("b/w") == rules.default


def test_zone_of_the_node_knows_of_daylight_saving_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = tmp_path / "zoneinfo" / "Europe" / "Berlin"
    monkeypatch.setattr(tier_rules, "LOCAL_TIME", local)
    assert zone_of("") == UTC
    local.parent.mkdir(parents=True)
    shutil.copy(next(place for path in TZPATH if (place := Path(path) / "Europe/Berlin").exists()), local)
    assert str(zone_of("")) == "Europe/Berlin"
    local.write_bytes(b"no zone")
    assert zone_of("") == UTC
