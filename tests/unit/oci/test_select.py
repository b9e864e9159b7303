"""Which runtime runs a container, and what is said when it is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from kybernate_shim.config import Config
from kybernate_shim.errors import Missing
from kybernate_shim.oci import select
from kybernate_shim.oci.options import RuntimeOptions
from kybernate_shim.oci.select import choose_runtime, resolve_cli, uses_systemd
from kybernate_shim.oci.spec import Spec

GPU = Spec({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]}})
PLAIN = Spec({})


@pytest.fixture
def bin_dir(tmp_path: Path) -> Path:
    """A directory for PATH that holds every runtime."""
    for name in ("runc", "crun", "youki", "kata", "nvidia-container-runtime"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    return tmp_path


def chosen(bin_dir: Path, spec: Spec, *, env: str = "", option: str = "", config: str = "") -> str:
    environment = {"PATH": str(bin_dir)} | ({"KYBERNATE_RUNTIME": env} if env else {})
    path = choose_runtime(environment, RuntimeOptions(binary_name=option), Config(runtime=config), spec)
    assert path.parent == bin_dir
    return path.name


@pytest.mark.parametrize("spec", [PLAIN, GPU], ids=["plain", "gpu"])
def test_environment_precedes_options_precede_configuration_precedes_need(bin_dir: Path, spec: Spec) -> None:
    assert chosen(bin_dir, spec, env="youki", option="crun", config="kata") == "youki"
    assert chosen(bin_dir, spec, option="crun", config="kata") == "crun"
    assert chosen(bin_dir, spec, config="kata") == "kata"
    assert chosen(bin_dir, spec) == ("nvidia-container-runtime" if spec is GPU else "runc")


def test_name_with_a_slash_is_a_path(bin_dir: Path) -> None:
    environment = {"PATH": "/nowhere", "KYBERNATE_RUNTIME": f"{bin_dir}/crun"}
    assert choose_runtime(environment, RuntimeOptions(), Config(), PLAIN) == bin_dir / "crun"


def test_first_directory_of_path_wins_and_empty_entries_are_passed_over(bin_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "runc").write_text("not executable")
    environment = {"PATH": f":{other}::{bin_dir}"}
    assert choose_runtime(environment, RuntimeOptions(), Config(), PLAIN) == bin_dir / "runc"


def test_gpu_runtime_is_also_looked_for_where_the_gpu_operator_puts_it(
    bin_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(select.DIRECTORIES, "nvidia-container-runtime", (Path("/nowhere"), bin_dir))
    found = choose_runtime({"PATH": "/empty"}, RuntimeOptions(), Config(), GPU)
    assert found == bin_dir / "nvidia-container-runtime"


def test_missing_gpu_runtime_names_reason_places_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(select.DIRECTORIES, "nvidia-container-runtime", (Path("/a"), Path("/none/toolkit")))
    with pytest.raises(Missing, match="OCI runtime") as caught:
        choose_runtime({"PATH": "/a:/b"}, RuntimeOptions(), Config(), GPU)
    assert str(caught.value) == (
        'OCI runtime "nvidia-container-runtime" not found (looked in /a, /b, /none/toolkit); it was requested by the '
        "container's environment NVIDIA_VISIBLE_DEVICES=all. Install the NVIDIA container toolkit, or name another "
        "runtime by `runtime` in /etc/kybernate/shim.toml."
    )


def test_named_runtime_that_is_missing_is_not_replaced(bin_dir: Path) -> None:
    with pytest.raises(Missing, match=r'^OCI runtime "gvisor" not found \(looked in .*\); it was requested by Binary'):
        chosen(bin_dir, PLAIN, option="gvisor")


@pytest.mark.parametrize("kind", ["absent", "directory", "not executable"])
def test_path_that_is_no_program_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "runc"
    if kind == "directory":
        path.mkdir()
    elif kind == "not executable":
        path.write_text("")
    with pytest.raises(Missing, match=f'OCI runtime "{path}" not found; it was requested by `runtime`'):
        choose_runtime({}, RuntimeOptions(), Config(runtime=str(path)), PLAIN)


@pytest.mark.parametrize(
    ("configured", "path", "option", "systemd"),
    [
        (None, "system.slice:cri:c", False, True),
        (None, "/default/c", True, False),
        (None, "", True, True),
        (None, "", False, False),
        (True, "/default/c", False, True),
        (False, "system.slice:cri:c", True, False),
    ],
)
def test_form_of_the_cgroups_path_decides_unless_configured(
    configured: bool | None, path: str, option: bool, systemd: bool
) -> None:
    spec = Spec({"linux": {"cgroupsPath": path}})
    assert uses_systemd(RuntimeOptions(systemd_cgroup=option), Config(systemd_cgroup=configured), spec) is systemd


@pytest.mark.parametrize(
    ("option", "root"), [("", "/run/containerd/runc/ns"), ("/run/docker/runtime-runc", "/run/docker/runtime-runc/ns")]
)
def test_root_of_the_options_replaces_the_configured_one(option: str, root: str) -> None:
    cli = resolve_cli(
        Path("/bin/runc"),
        namespace="ns",
        log=Path("/b/log.json"),
        options=RuntimeOptions(root=option),
        config=Config(),
        spec=PLAIN,
    )
    assert (cli.binary, str(cli.root), cli.log, cli.systemd_cgroup) == (
        Path("/bin/runc"),
        root,
        Path("/b/log.json"),
        False,
    )
