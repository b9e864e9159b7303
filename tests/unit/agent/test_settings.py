"""agent.toml: what a file sets, what is wrong with one, and what a reload changes."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from kybernate.agent.settings import LiveSettings, Settings
from kybernate.agent.tier_settings import WorkloadRule
from kybernate_shim.config import ConfigInvalid
from kybernate_shim.config.declaring import LIVE, NODE, RESTART
from kybernate_shim.config.documenting import documented, markdown_table


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "agent.toml"


def test_missing_file_gives_the_defaults(file: Path) -> None:
    assert Settings.load(file) == Settings()


def test_values_of_a_file_arrive(file: Path) -> None:
    file.write_text(
        'node_name = "a"\n[operations]\nper_gpu = 3\n[self_socket]\nquota = "2GiB"\n[metrics]\nlisten = "[::1]:80"'
    )
    found = Settings.load(file)
    assert (found.node_name, found.operations.per_gpu, found.self_socket.quota) == ("a", 3, 2 << 30)
    assert found.metrics.listen == "[::1]:80"


@pytest.mark.parametrize(
    "text",
    [
        "[operations]\nper_gpu = 0",
        "[operations]\nrunning = true",
        '[metrics]\nlisten = "9464"',
        '[metrics]\nlisten = "localhost:70000"',
        '[metrics]\nlisten = "localhost:²"',
        '[tls]\nlisten = "0.0.0.0:7443"',
        '[webhooks]\nurls = ["file:///etc/passwd"]',
        "[[tls]]",
        "[tiers.ram]\nhigh = 0",
        "[tiers.ram]\nhigh = 0.5\nlow = 0.5",
        "[tiers.policy]\nkeep_last = -1",
        "[tiers.policy]\nhalf_life = 0",
        '[tiers.policy]\ntime_zone = "Europe/Atlantis"',
        '[tiers.policy]\ntime_zone = "../../../etc/passwd"',
        '[tiers.policy]\ntime_zone = "Europe"',
        "[tiers.policy]\npark_high = 0.7",
        '[tiers.policy]\nworkloads = ["a"]',
        '[tiers.policy.workloads."a/*"]\nttl = "1d"',
        '[tiers.policy.workloads."a/*"]\nttI = 1',
        '[tiers.policy.workloads]\n"" = { ttl = 1 }',
    ],
)
def test_wrong_value_is_refused(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigInvalid, match=str(file)):
        Settings.load(file)


def test_listener_with_certificates_names_all_that_is_missing(file: Path) -> None:
    file.write_text('[tls]\nlisten = "0.0.0.0:7443"\nkey = "/key"')
    with pytest.raises(ConfigInvalid, match=r"tls\.certificate must be set.*; tls\.client_ca must be set"):
        Settings.load(file)


def test_unknown_key_is_a_warning(file: Path) -> None:
    file.write_text("[operations]\nper_gpus = 1")
    (warning,) = Settings.load(file).warnings
    assert "did you mean operations.per_gpu?" in warning


def test_rules_of_workloads_keep_the_order_of_the_file(file: Path) -> None:
    file.write_text(
        '[tiers.policy.workloads]\n"b/trainer" = { keep_last = 3, pinned = true }\n"*" = { ttl = 60, prefetch = false }'
    )
    assert Settings.load(file).tiers.policy.workloads == (
        WorkloadRule("b/trainer", keep_last=3, pinned=True),
        WorkloadRule("*", ttl=60.0, prefetch=False),
    )


def test_reload_changes_what_is_live_and_names_the_rest(file: Path) -> None:
    live = LiveSettings.load(file)
    file.write_text('socket = "/run/other.sock"\n[operations]\nper_gpu = 7\n[metrics]\nlisten = "localhost:80"')
    live.reload()
    assert (live.current.operations.per_gpu, live.problem) == (7, "")
    assert (live.current.socket, live.current.metrics.listen) == (Settings().socket, "")
    assert live.pending == ("socket", "metrics.listen")


def test_file_that_cannot_be_used_keeps_the_last_good_one(file: Path) -> None:
    file.write_text("[operations]\nper_gpu = 7")
    live = LiveSettings.load(file)
    for wrong in ("[operations", "[operations]\nper_gpu = -1", "\0"):
        file.write_text(wrong)
        live.reload()
        assert live.current.operations.per_gpu == 7
        assert str(file) in live.problem
    file.write_text("")
    live.reload()
    assert (live.current.operations.per_gpu, live.problem) == (2, "")


def test_every_key_is_documented_with_a_default_that_a_file_may_have(file: Path) -> None:
    rows = {row.key: row for row in documented(Settings)}
    assert {row.since for row in rows.values()} == {LIVE, RESTART}
    assert {row.by for row in rows.values()} == {NODE}
    assert "changed by" not in markdown_table(Settings)
    for key, row in rows.items():
        if row.default.startswith("`"):
            table, _, name = key.rpartition(".")
            file.write_text((f"[{table}]\n" if table else "") + f"{name} = {row.default.strip('`')}")
            assert Settings.load(file) == Settings(), key
            assert tomllib.loads(file.read_text())
