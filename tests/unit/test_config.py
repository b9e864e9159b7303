"""shim.toml: defaults, values, what is wrong with a file, and what runtime options may change."""

from __future__ import annotations

import dataclasses
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.config import (
    NODE,
    Config,
    ConfigInvalid,
    Deadlines,
    GpuSettings,
)
from kybernate_shim.config.documenting import documented, markdown_table
from kybernate_shim.sizes import NO_NODE


def load(tmp_path: Path, content: str) -> Config:
    file = tmp_path / "shim.toml"
    file.write_text(content)
    return Config.load(file)


def test_missing_file_gives_the_defaults(tmp_path: Path) -> None:
    config = Config.load(tmp_path / "none.toml")
    assert config == Config()
    assert config.runtime == ""
    assert config.runtime_root == Path("/run/containerd/runc")
    assert config.systemd_cgroup is None
    assert config.deadlines == Deadlines(create=120, kill=10, checkpoint=3600, restore=1800)


def test_every_key_of_a_file_arrives(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """
        runtime = "crun"
        runtime_root = "/run/kyb"
        systemd_cgroup = true
        criu = "/opt/criu/sbin/criu"
        criu_libdir = "/opt/criu/lib"
        checkpoint_root = "/mnt/images"
        work_root = "/mnt/work"
        log_file = "/var/log/kybernate/shim.log"
        log_level = "debug"
        annotations = ["kybernate.io/*"]
        [deadlines]
        create = 7
        io_drain = 0.5
        """,
    )
    assert config == Config(
        runtime="crun",
        runtime_root=Path("/run/kyb"),
        systemd_cgroup=True,
        criu=Path("/opt/criu/sbin/criu"),
        criu_libdir=Path("/opt/criu/lib"),
        checkpoint_root=Path("/mnt/images"),
        work_root=Path("/mnt/work"),
        log_file=Path("/var/log/kybernate/shim.log"),
        log_level="debug",
        annotations=("kybernate.io/*",),
        deadlines=Deadlines(create=7, io_drain=0.5),
    )


def test_unknown_keys_warn_with_the_nearest_known_one(tmp_path: Path) -> None:
    config = load(tmp_path, 'runtme = "crun"\nlog_level = "error"\n[deadlines]\ncreat = 1\n[future]\nx = 1\n')
    file = tmp_path / "shim.toml"
    assert config.warnings == (
        f"{file}: unknown key runtme (did you mean runtime?)",
        f"{file}: unknown key deadlines.creat (did you mean deadlines.create?)",
        f"{file}: unknown key future",
    )
    assert config.log_level == "error"


def test_all_wrong_values_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        load(tmp_path, 'runtime = 3\ncriu = "/opt/criu-dev"\nannotations = "x"\n[deadlines]\nkill = -1\n')
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'shim.toml'}: runtime must be a string, not 3 (int); criu must be ")
    assert "annotations must be a list of strings, not 'x' (str)" in message
    assert message.endswith("deadlines.kill must be a number of seconds, 0 or more, not -1 (int)")


@pytest.mark.parametrize(
    "line",
    [
        'systemd_cgroup = "yes"',
        "systemd_cgroup = 1",
        'runtime_root = "relative"',
        'checkpoint_root = ""',
        'log_level = "loud"',
        "annotations = [1]",
        "deadlines = 5",
        "deadlines.create = true",
        'deadlines.create = "1s"',
        "deadlines.create = inf",
        "deadlines.create = nan",
        'gpu.image_pool_files = "18GiB"',
        'gpu.image_pool_files = ["18GiB", "1MiB"]',
        "gpu.image_pool_files = [0]",
    ],
)
def test_value_of_the_wrong_form_is_refused(line: str) -> None:
    with pytest.raises(ConfigInvalid, match=line.split(" =", maxsplit=1)[0]):
        Config().merged(line, by=NODE)


def test_file_that_is_not_toml_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"shim\.toml: not TOML: .*line 1"):
        load(tmp_path, "runtime = runc")


def test_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        Config.load(tmp_path)


def test_merging_keeps_what_is_not_mentioned_and_leaves_the_original() -> None:
    node = Config().merged('runtime = "crun"\n[deadlines]\ncreate = 1\nkill = 2', by=NODE)
    merged = node.merged({"deadlines": {"kill": 9}})
    assert (merged.runtime, merged.deadlines.create, merged.deadlines.kill) == ("crun", 1, 9)
    assert node.deadlines.kill == 2


def test_options_cannot_change_what_belongs_to_the_node() -> None:
    merged = Config().merged('log_file = "/etc/passwd"\nannotations = ["*"]\nruntime = "crun"')
    assert merged.log_file is None
    assert not merged.pod_may_use("anything")
    assert merged.runtime == "crun"
    assert [warning.split(":")[0] for warning in merged.warnings] == ["runtime options"] * 2
    assert "log_file has no effect here, only in /etc/kybernate/shim.toml" in merged.warnings[0]


@pytest.mark.parametrize(
    ("patterns", "annotation", "allowed"),
    [
        (None, "kybernate.io/restore-from", True),
        (None, "kybernate.io/other", True),
        (None, "example.com/other", False),
        (["kybernate.io/*"], "kybernate.io/other", True),
        ([], "kybernate.io/restore-from", False),
    ],
)
def test_pods_may_use_the_listed_annotations(patterns: list[str] | None, annotation: str, allowed: bool) -> None:
    config = Config() if patterns is None else Config().merged({"annotations": patterns}, by=NODE)
    assert config.pod_may_use(annotation) is allowed


def test_every_key_is_documented_with_the_default_that_it_has() -> None:
    rows = {row.key: row for row in documented()}
    tables = {"deadlines": Deadlines, "gpu": GpuSettings}
    keys = {key.name for key in dataclasses.fields(Config)} - {*tables, "warnings"}
    keys |= {f"{table}.{key.name}" for table, kind in tables.items() for key in dataclasses.fields(kind)}
    assert set(rows) == keys
    assert all(row.doc and row.form and row.default for row in rows.values())
    literal = {key: row.default.strip("`") for key, row in rows.items() if row.default.startswith("`")}
    assert Config().merged("\n".join(f"{key} = {value}" for key, value in literal.items()), by=NODE) == Config()
    assert len(markdown_table().splitlines()) == len(rows) + 2


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ('arena = "64GiB"', ((NO_NODE, 64 << 30),)),
        ("arena = 4096", ((NO_NODE, 4096),)),
        ("arena = 0", ()),
        ('arena = { 1 = "32 GiB", 0 = "1GiB" }', ((0, 1 << 30), (1, 32 << 30))),
        ("arena = { 0 = 4096, 1 = 0 }", ((0, 4096),)),
    ],
)
def test_size_of_the_arena_may_be_given_by_numa_node(text: str, sizes: object) -> None:
    assert Config().merged(f"gpu.{text}", by=NODE).gpu.arena == sizes


@pytest.mark.parametrize("value", ['"lots"', "-1", "true", '{ a = "1GiB" }', '{ 0 = "x" }', '{ -1 = "1GiB" }', "[1]"])
def test_size_of_the_arena_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigInvalid, match=r"gpu\.arena must be a number of bytes.* or one for each NUMA node"):
        Config().merged(f"gpu.arena = {value}", by=NODE)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
keys = st.sampled_from([key.name for key in dataclasses.fields(Config)]) | st.text(max_size=8)


@given(st.dictionaries(keys, json_like))
def test_any_document_is_read_or_refused(document: dict[str, Any]) -> None:
    with suppress(ConfigInvalid):
        config = Config().merged(document, by=NODE)
        assert isinstance(config.deadlines.create, float)
        assert config.warnings == () or all("unknown key" in warning for warning in config.warnings)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        with pytest.raises(ConfigInvalid):
            Config().merged(text)
